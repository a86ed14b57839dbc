"""Problem shapes of kernels that this code does not know: one JSON object beside the columns of KDA's, which may be empty.

Revision: 0005
Follows: 0004
"""

import sqlalchemy as sa
from alembic import op

from kdatune_kernels.errors import StoreError

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COLUMNS: dict[str, type[sa.types.TypeEngine]] = {  # type: ignore[type-arg]
    "n_sequences": sa.BigInteger,
    "n_heads": sa.BigInteger,
    "n_value_heads": sa.BigInteger,
    "n_tokens": sa.BigInteger,
    "key_dim": sa.BigInteger,
    "value_dim": sa.BigInteger,
    "dtype": sa.Text,
    "varlen": sa.Boolean,
    "initial_state": sa.Boolean,
    "final_state": sa.Boolean,
    "state_v_first": sa.Boolean,
    "state_dtype": sa.Text,
    "bucket_n_sequences": sa.BigInteger,
    "bucket_n_tokens": sa.BigInteger,
}


def upgrade() -> None:
    with op.batch_alter_table("problem") as batch:
        batch.add_column(sa.Column("shape_json", sa.Text(), nullable=True))
        for name, kind in _COLUMNS.items():
            batch.alter_column(name, existing_type=kind(), nullable=True)
        batch.create_check_constraint(
            op.f("ck_problem_shape_json"), "(kernel IN ('k1', 'k2', 'kda')) = (shape_json IS NULL)"
        )
        filled = " AND ".join(f"{name} IS NOT NULL" for name in _COLUMNS)
        batch.create_check_constraint(op.f("ck_problem_shape_columns"), f"shape_json IS NOT NULL OR ({filled})")


def downgrade() -> None:
    problem = sa.table("problem", sa.column("kernel"), sa.column("shape_json"))
    others = op.get_bind().execute(
        sa.select(problem.c.kernel).where(problem.c.shape_json.is_not(None)).distinct().order_by(problem.c.kernel)
    )
    names = [str(name) for (name,) in others]
    if names:
        raise StoreError(f"schema 0004 cannot hold what is stored of {', '.join(names)}; delete it first, or stay")
    with op.batch_alter_table("problem") as batch:
        batch.drop_constraint(op.f("ck_problem_shape_columns"), type_="check")
        batch.drop_constraint(op.f("ck_problem_shape_json"), type_="check")
        for name, kind in _COLUMNS.items():
            batch.alter_column(name, existing_type=kind(), nullable=False)
        batch.drop_column("shape_json")
