"""The schema's history: an Alembic environment that is configured in code, with a version table of its own.

Optuna claims Alembic's default version table; with ours apart, both can live in one database.
"""

from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory

VERSION_TABLE = "kdatune_alembic_version"


def alembic_config() -> Config:
    """The Alembic configuration of this package; `env.py` reads the connection from its attributes."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    return config


def head() -> str:
    """The newest revision of the schema, the one this code works with."""
    revision = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if revision is None:
        raise RuntimeError("kdatune_migrations holds no revision; the installation is incomplete")
    return revision


def knows(revision: str) -> bool:
    """Whether the revision is part of this history; one that is not was written by a newer kdatune."""
    return any(script.revision == revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions())
