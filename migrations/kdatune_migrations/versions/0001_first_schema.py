"""The first schema: GPU models, builds, problems, runs, measurements, promotions, profiles, demand.

Revision: 0001
Follows: nothing
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "build",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("kernel_hash", sa.Text(), nullable=False),
        sa.Column("space_hash", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("triton", sa.Text(), nullable=False),
        sa.Column("ptxas", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_build")),
        sa.UniqueConstraint("digest", name=op.f("uq_build_digest")),
    )
    op.create_table(
        "demand",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gpu_name", sa.Text(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("shape_key", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("count > 0", name=op.f("ck_demand_count")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_demand")),
        sa.UniqueConstraint("gpu_name", "kernel", "shape_key", name=op.f("uq_demand_gpu_name_kernel_shape_key")),
    )
    op.create_table(
        "gpu",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("compute_capability", sa.Text(), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("l2_bytes", sa.BigInteger(), nullable=False),
        sa.Column("smem_per_block_bytes", sa.BigInteger(), nullable=False),
        sa.Column("registers_per_sm", sa.BigInteger(), nullable=False),
        sa.Column("warps_per_sm", sa.BigInteger(), nullable=False),
        sa.Column("mig_profile", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpu")),
        sa.UniqueConstraint(
            "name", "compute_capability", "sm_count", "mig_profile", "memory_bytes", name="uq_gpu_identity"
        ),
    )
    op.create_table(
        "problem",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("shape_hash", sa.Text(), nullable=False),
        sa.Column("shape_key", sa.Text(), nullable=False),
        sa.Column("n_sequences", sa.BigInteger(), nullable=False),
        sa.Column("n_heads", sa.BigInteger(), nullable=False),
        sa.Column("n_value_heads", sa.BigInteger(), nullable=False),
        sa.Column("n_tokens", sa.BigInteger(), nullable=False),
        sa.Column("key_dim", sa.BigInteger(), nullable=False),
        sa.Column("value_dim", sa.BigInteger(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("varlen", sa.Boolean(), nullable=False),
        sa.Column("longest_tokens", sa.BigInteger(), nullable=True),
        sa.Column("initial_state", sa.Boolean(), nullable=False),
        sa.Column("final_state", sa.Boolean(), nullable=False),
        sa.Column("state_v_first", sa.Boolean(), nullable=False),
        sa.Column("state_dtype", sa.Text(), nullable=False),
        sa.Column("bucket_n_sequences", sa.BigInteger(), nullable=False),
        sa.Column("bucket_n_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_problem")),
        sa.UniqueConstraint("kernel", "shape_hash", name=op.f("uq_problem_kernel_shape_hash")),
    )
    op.create_index("ix_problem_shape_hash", "problem", ["shape_hash"])
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("sampler", sa.Text(), nullable=False),
        sa.Column("budget_trials", sa.Integer(), nullable=True),
        sa.Column("budget_seconds", sa.Double(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("optuna_version", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("outcome_counts", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('running', 'done', 'failed', 'interrupted')", name=op.f("ck_run_state")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_run_gpu_id_gpu")),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_run_problem_id_problem")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
    )
    op.create_index("ix_run_gpu_id", "run", ["gpu_id"])
    op.create_index("ix_run_problem_id", "run", ["problem_id"])
    op.create_index("ix_run_state", "run", ["state"])
    op.create_table(
        "measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=True),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("build_id", sa.Integer(), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("median_us", sa.Double(), nullable=True),
        sa.Column("p20_us", sa.Double(), nullable=True),
        sa.Column("p80_us", sa.Double(), nullable=True),
        sa.Column("sample_count", sa.Integer(), nullable=True),
        sa.Column("o_error_ratio", sa.Double(), nullable=True),
        sa.Column("state_error_ratio", sa.Double(), nullable=True),
        sa.Column("requested_num_warps", sa.Integer(), nullable=True),
        sa.Column("effective_num_warps", sa.Integer(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spills", sa.Integer(), nullable=True),
        sa.Column("smem_bytes", sa.Integer(), nullable=True),
        sa.Column("occupancy_pct", sa.Double(), nullable=True),
        sa.Column("sm_clock_mhz", sa.Double(), nullable=True),
        sa.Column("throttle_reasons", sa.Text(), nullable=True),
        sa.Column("regime", sa.Text(), nullable=True),
        sa.Column("estimated", sa.Boolean(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "outcome <> 'ok' OR (median_us IS NOT NULL AND median_us > 0)", name=op.f("ck_measurement_ok_has_time")
        ),
        sa.CheckConstraint(
            "outcome IN ('ok', 'compile_error', 'resource', 'launch_error', 'illegal_access', "
            "'timeout', 'abort', 'incorrect', 'nondeterministic')",
            name=op.f("ck_measurement_outcome"),
        ),
        sa.ForeignKeyConstraint(["build_id"], ["build.id"], name=op.f("fk_measurement_build_id_build")),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_measurement_gpu_id_gpu")),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_measurement_problem_id_problem")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_measurement_run_id_run")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurement")),
    )
    op.create_index("ix_measurement_build_id", "measurement", ["build_id"])
    op.create_index("ix_measurement_gpu_id", "measurement", ["gpu_id"])
    op.create_index("ix_measurement_outcome", "measurement", ["outcome"])
    op.create_index("ix_measurement_problem_id", "measurement", ["problem_id"])
    op.create_index(
        "ix_measurement_resume", "measurement", ["kernel", "gpu_id", "problem_id", "build_id", "config_hash"]
    )
    op.create_index("ix_measurement_run_id", "measurement", ["run_id"])
    op.create_table(
        "profile",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("measurement_id", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("issue_active_pct", sa.Double(), nullable=True),
        sa.Column("barrier_stall_per_issue", sa.Double(), nullable=True),
        sa.Column("counters", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("ncu_version", sa.Text(), nullable=True),
        sa.Column("unavailable_reason", sa.Text(), nullable=True),
        sa.Column("profiled_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("stage IN ('k1', 'k2')", name=op.f("ck_profile_stage")),
        sa.CheckConstraint(
            "(counters IS NULL) <> (unavailable_reason IS NULL)", name=op.f("ck_profile_counters_or_reason")
        ),
        sa.CheckConstraint(
            "unavailable_reason IS NULL OR (issue_active_pct IS NULL AND barrier_stall_per_issue IS NULL)",
            name=op.f("ck_profile_unavailable_is_null"),
        ),
        sa.ForeignKeyConstraint(
            ["measurement_id"], ["measurement.id"], name=op.f("fk_profile_measurement_id_measurement")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_profile")),
    )
    op.create_index("ix_profile_measurement_id", "profile", ["measurement_id"])
    op.create_table(
        "promotion",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("measurement_id", sa.Integer(), nullable=True),
        sa.Column("baseline_measurement_id", sa.Integer(), nullable=True),
        sa.Column("config_json", sa.Text(), nullable=True),
        sa.Column("config_hash", sa.Text(), nullable=True),
        sa.Column("default_us", sa.Double(), nullable=True),
        sa.Column("gain", sa.Double(), nullable=True),
        sa.Column("gain_low", sa.Double(), nullable=True),
        sa.Column("gain_high", sa.Double(), nullable=True),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "decision IN ('promoted', 'tie', 'rejected', 'rollback')", name=op.f("ck_promotion_decision")
        ),
        sa.CheckConstraint("measurement_id IS NOT NULL OR decision = 'rollback'", name=op.f("ck_promotion_measured")),
        sa.CheckConstraint(
            "(measurement_id IS NULL) = (config_json IS NULL) AND (measurement_id IS NULL) = (config_hash IS NULL)",
            name=op.f("ck_promotion_config_of_measurement"),
        ),
        sa.CheckConstraint("generation > 0", name=op.f("ck_promotion_generation")),
        sa.ForeignKeyConstraint(
            ["baseline_measurement_id"],
            ["measurement.id"],
            name=op.f("fk_promotion_baseline_measurement_id_measurement"),
        ),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpu.id"], name=op.f("fk_promotion_gpu_id_gpu")),
        sa.ForeignKeyConstraint(
            ["measurement_id"], ["measurement.id"], name=op.f("fk_promotion_measurement_id_measurement")
        ),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=op.f("fk_promotion_problem_id_problem")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_promotion")),
        sa.UniqueConstraint("generation", name=op.f("uq_promotion_generation")),
    )
    op.create_index("ix_promotion_decision", "promotion", ["decision"])
    op.create_index("ix_promotion_gpu_id", "promotion", ["gpu_id"])
    op.create_index("ix_promotion_measurement_id", "promotion", ["measurement_id"])
    op.create_index("ix_promotion_problem_id", "promotion", ["problem_id"])
    op.create_index("ix_promotion_served", "promotion", ["kernel", "gpu_id", "problem_id", "generation"])


def downgrade() -> None:
    """Drop every table with its rows; indexes go with their tables."""
    op.drop_table("promotion")
    op.drop_table("profile")
    op.drop_table("measurement")
    op.drop_table("run")
    op.drop_table("problem")
    op.drop_table("gpu")
    op.drop_table("demand")
    op.drop_table("build")
