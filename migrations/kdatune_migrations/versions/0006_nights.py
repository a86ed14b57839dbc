"""Nights: their reports, the reference kernel's times, and the checks of what is served.

Revision: 0006
Follows: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "night",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("build_id", sa.Integer(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("budget_seconds", sa.Double(), nullable=False),
        sa.Column("machine_ratio", sa.Double(), nullable=True),
        sa.Column("report", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('running', 'done', 'failed', 'interrupted')", name=op.f("ck_night_state")),
        sa.ForeignKeyConstraint(["build_id"], ["build.id"], name=op.f("fk_night_build_id_build")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_night_gpu_id_gpu")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_night")),
    )
    op.create_index("ix_night_gpu_id", "night", ["gpu_id"])
    op.create_table(
        "reference_time",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("night_id", sa.Integer(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("build_id", sa.Integer(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("shape_key", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("p20_us", sa.Double(), nullable=True),
        sa.Column("p80_us", sa.Double(), nullable=True),
        sa.Column("sample_count", sa.Integer(), nullable=True),
        sa.Column("sm_clock_mhz", sa.Double(), nullable=True),
        sa.Column("throttle_reasons", sa.Text(), nullable=True),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "outcome <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)", name=op.f("ck_reference_time_ok_has_time")
        ),
        sa.ForeignKeyConstraint(["build_id"], ["build.id"], name=op.f("fk_reference_time_build_id_build")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_reference_time_gpu_id_gpu")),
        sa.ForeignKeyConstraint(["night_id"], ["night.id"], name=op.f("fk_reference_time_night_id_night")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reference_time")),
    )
    op.create_index("ix_reference_time_night_id", "reference_time", ["night_id"])
    op.create_index("ix_reference_time_history", "reference_time", ["gpu_id", "build_id", "backend"])
    op.create_table(
        "champion_check",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("night_id", sa.Integer(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("build_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("against_hash", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("measured_us", sa.Double(), nullable=True),
        sa.Column("against_us", sa.Double(), nullable=True),
        sa.Column("expected_us", sa.Double(), nullable=True),
        sa.Column("machine_ratio", sa.Double(), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("checked_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("verdict IN ('ok', 'slower', 'failed', 'unjudged')", name=op.f("ck_champion_check_verdict")),
        sa.ForeignKeyConstraint(["build_id"], ["build.id"], name=op.f("fk_champion_check_build_id_build")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_champion_check_gpu_id_gpu")),
        sa.ForeignKeyConstraint(["night_id"], ["night.id"], name=op.f("fk_champion_check_night_id_night")),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_champion_check_problem_id_problem")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_champion_check")),
    )
    op.create_index("ix_champion_check_night_id", "champion_check", ["night_id"])
    op.create_index("ix_champion_check_history", "champion_check", ["gpu_id", "problem_id", "build_id", "config_hash"])


def downgrade() -> None:
    op.drop_table("champion_check")
    op.drop_table("reference_time")
    op.drop_table("night")
