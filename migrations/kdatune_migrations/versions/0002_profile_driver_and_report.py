"""Profiles say under which driver they were taken, and in which kept report file they can be looked at.

Revision: 0002
Follows: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("profile", sa.Column("driver", sa.Text(), nullable=True))
    op.add_column("profile", sa.Column("report_file", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("profile", "report_file")
    op.drop_column("profile", "driver")
