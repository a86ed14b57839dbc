"""Run by Alembic: migrates over the connection that `kdatune_tuner.store.engine` hands in, inside its transaction."""

from alembic import context
from sqlalchemy import Connection

from kdatune_migrations import VERSION_TABLE
from kdatune_tuner.store.models import Base


def run() -> None:
    connection = context.config.attributes.get("connection")
    if not isinstance(connection, Connection):
        raise TypeError("no connection given; migrate with `kdatune db upgrade`")
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=True,
        transactional_ddl=True,  # holds on SQLite too, since the store emits BEGIN itself
    )
    with context.begin_transaction():
        context.run_migrations()


run()
