"""Regressions that were found in the stored history; indexes by which measurements that are referred to are found.

Revision: 0007
Follows: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "regression",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("before_us", sa.Double(), nullable=False),
        sa.Column("after_us", sa.Double(), nullable=False),
        sa.Column("now_us", sa.Double(), nullable=False),
        sa.Column("change_pct", sa.Double(), nullable=False),
        sa.Column("confidence_pct", sa.Double(), nullable=False),
        sa.Column("last_good_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("build_before_id", sa.Integer(), nullable=False),
        sa.Column("build_after_id", sa.Integer(), nullable=False),
        sa.Column("measurement_before_id", sa.Integer(), nullable=False),
        sa.Column("measurement_after_id", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("is_served", sa.Boolean(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("resolved_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("resolution", sa.Text(), nullable=True),
        sa.Column("acknowledged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("acknowledged_by", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=True),
        sa.CheckConstraint("before_us > 0 AND after_us > before_us", name=op.f("ck_regression_slower")),
        sa.CheckConstraint("(resolved_at IS NULL) = (resolution IS NULL)", name=op.f("ck_regression_resolution")),
        sa.CheckConstraint(
            "(acknowledged_at IS NULL) = (acknowledged_by IS NULL)", name=op.f("ck_regression_acknowledged")
        ),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_regression_gpu_id_gpu")),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_regression_problem_id_problem")),
        sa.ForeignKeyConstraint(["build_before_id"], ["build.id"], name=op.f("fk_regression_build_before_id_build")),
        sa.ForeignKeyConstraint(["build_after_id"], ["build.id"], name=op.f("fk_regression_build_after_id_build")),
        sa.ForeignKeyConstraint(
            ["measurement_before_id"], ["measurement.id"], name=op.f("fk_regression_measurement_before_id_measurement")
        ),
        sa.ForeignKeyConstraint(
            ["measurement_after_id"], ["measurement.id"], name=op.f("fk_regression_measurement_after_id_measurement")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_regression")),
    )
    op.create_index("ix_regression_measurement_before_id", "regression", ["measurement_before_id"])
    op.create_index("ix_regression_measurement_after_id", "regression", ["measurement_after_id"])
    # a measurement is removed only where nothing refers to it: without these every removal reads whole tables
    op.create_index("ix_promotion_baseline_measurement_id", "promotion", ["baseline_measurement_id"])
    op.create_index("ix_receipt_measurement_id", "receipt", ["measurement_id"])
    op.create_index("ix_regression_key", "regression", ["kernel", "gpu_id", "problem_id", "config_hash"])


def downgrade() -> None:
    op.drop_index("ix_receipt_measurement_id", "receipt")
    op.drop_index("ix_promotion_baseline_measurement_id", "promotion")
    op.drop_table("regression")
