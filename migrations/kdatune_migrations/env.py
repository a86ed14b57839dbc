"""Run by Alembic: migrates over the connection that `kdatune_tuner.store.engine` hands in, inside its transaction."""

from typing import Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection

from kdatune_migrations import VERSION_TABLE
from kdatune_tuner.store.models import Base
from kdatune_tuner.store.models import UtcDateTime


def render_item(kind: str, item: object, _context: AutogenContext) -> str | Literal[False]:
    """A revision must not import the models, which change after it: it names the plain type."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, UtcDateTime) else False


def run() -> None:
    connection = context.config.attributes.get("connection")
    if not isinstance(connection, Connection):
        raise TypeError("no connection given; migrate with `kdatune db upgrade`")
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=True,
        render_item=render_item,
        transactional_ddl=True,  # holds on SQLite too, since the store emits BEGIN itself
    )
    with context.begin_transaction():
        context.run_migrations()


run()
