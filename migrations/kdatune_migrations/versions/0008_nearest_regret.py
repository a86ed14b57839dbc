"""Promotions say what the nearest answer would have cost for their shape.

Revision: 0008
Follows: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("promotion", sa.Column("nearest_regret", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("promotion", "nearest_regret")
