"""For developers: `python -m kdatune_migrations "what changes"` writes the next revision from the models.

The revision is what the models have and a fresh database does not; read it before it is committed.
"""

import sys
import tempfile
from pathlib import Path

from alembic import command

from kdatune_migrations import alembic_config
from kdatune_migrations import head
from kdatune_tuner.store.engine import open_engine
from kdatune_tuner.store.engine import upgrade


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit('usage: python -m kdatune_migrations "what changes"')
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'fresh.db'}"
        upgrade(url)
        engine = open_engine(url)
        config = alembic_config()
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.revision(config, message=sys.argv[1], autogenerate=True, rev_id=f"{int(head()) + 1:04d}")
        engine.dispose()


if __name__ == "__main__":
    main()
