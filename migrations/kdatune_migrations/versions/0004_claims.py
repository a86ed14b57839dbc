"""Claims: which worker tunes which key, so that several workers and hosts share one work.

Revision: 0004
Follows: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "claim",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("build_id", sa.Integer(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("round_started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_ends_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.CheckConstraint("state IN ('open', 'held', 'done', 'failed')", name=op.f("ck_claim_state")),
        sa.CheckConstraint(
            "state <> 'held' OR (owner IS NOT NULL AND lease_ends_at IS NOT NULL)", name=op.f("ck_claim_held")
        ),
        sa.CheckConstraint("attempts >= 0", name=op.f("ck_claim_attempts")),
        sa.ForeignKeyConstraint(["build_id"], ["build.id"], name=op.f("fk_claim_build_id_build")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_claim_gpu_id_gpu")),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_claim_problem_id_problem")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_claim_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claim")),
        sa.UniqueConstraint("gpu_id", "problem_id", "build_id", "plan", name="uq_claim_key"),
    )


def downgrade() -> None:
    op.drop_table("claim")
