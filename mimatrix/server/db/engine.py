"""The database: SQLite in a folder, or PostgreSQL by its address. Older ones are upgraded, newer ones refused."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic_core import from_json
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
    TimeoutError,  # noqa: A004 (of the pool)
)
from sqlalchemy.orm import Session, sessionmaker

from mimatrix.core.errors import UserError, WorldError

_MIGRATIONS = Path(__file__).parent / "migrations"
_PATIENCE_S = 10
_POSTGRESQL = {
    "connect_timeout": _PATIENCE_S,
    "keepalives_idle": _PATIENCE_S,
    "keepalives_interval": _PATIENCE_S // 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 1000 * _PATIENCE_S,
}
"""A connection over which nothing comes back is lost after seconds; the system's own limit is many minutes."""
DATABASE_FILE = "mimatrix.db"
DATABASE_UNAVAILABLE = (OperationalError, InterfaceError, TimeoutError)
"""What is raised if the database does not answer, or all connections to it are in use; it may answer later."""


class Sessions:
    """Sessions on one database: `sessions()` to read, `sessions.begin()` to write, in one transaction each."""

    def __init__(self, engine: Engine) -> None:
        self._reading = sessionmaker(engine, expire_on_commit=False)
        # SQLite must know of a write when the transaction begins: later another one may have come first.
        writing = engine.execution_options(begin="IMMEDIATE", synchronous="FULL")
        self._writing = sessionmaker(writing, expire_on_commit=False)
        self._writing_soon = sessionmaker(writing.execution_options(synchronous="NORMAL"), expire_on_commit=False)

    def __call__(self) -> Session:
        """Return a session to read with."""
        return self._reading()

    def begin(self, *, durable: bool = True) -> AbstractContextManager[Session]:
        """Write: all of it when the context is left, or nothing if an error leaves it.

        Args:
            durable: Survive a power loss from then on. Metrics need not, and are written more cheaply without.
        """
        return (self._writing if durable else self._writing_soon).begin()


def address_in(folder: Path) -> str:
    """Return the address of the embedded database in a folder."""
    return f"sqlite:///{folder / DATABASE_FILE}"


def opened(address: str) -> tuple[Engine, Sessions]:
    """Open a database, and bring its tables up to date.

    Raises:
        UserError: It is not a database that this version can use.
        WorldError: It does not answer, or cannot be written.
    """
    engine = _engine(address)
    try:
        _upgrade(engine)
    except UserError:
        engine.dispose()
        raise
    except SQLAlchemyError as error:
        engine.dispose()
        first = str(error).splitlines()[0]
        raise WorldError(
            f"the database {_shown(address)} cannot be used ({first}); is it there, and writable?"
        ) from None
    return engine, Sessions(engine)


def _engine(address: str) -> Engine:
    try:
        url = make_url(address)
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        if url.get_backend_name() not in ("sqlite", "postgresql"):
            raise UserError(f"the database {_shown(address)} is of an unknown kind; use postgresql://user@host/name")
        # What the address says comes first.
        arguments = {name: value for name, value in _POSTGRESQL.items() if name not in url.query}
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": arguments}
        if url.get_backend_name() == "sqlite":
            options = {"connect_args": {"timeout": _PATIENCE_S, "check_same_thread": False}}
        # Most of the time that an answer takes would be spent in reading JSON; pydantic's reader takes a quarter of it.
        engine = create_engine(url, json_deserializer=from_json, **options)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f'"{_shown(address)}" is not the address of a database ({error}); write postgresql://user@host/name'
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    # Transactions are begun below, not by the driver, which would begin them only at the first write.
    connection.isolation_level = None
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Any) -> None:
    options = connection.get_execution_options()
    if "synchronous" in options:
        # In WAL mode FULL is one more fsync per commit: without it the last commits may be lost with the power.
        connection.exec_driver_sql(f"PRAGMA synchronous={options['synchronous']}")
    connection.exec_driver_sql(f"BEGIN {options.get('begin', 'DEFERRED')}")


def _upgrade(engine: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    with engine.begin() as connection:
        now = MigrationContext.configure(connection).get_current_revision()
        if now is not None and now not in known:
            raise UserError(
                f"the database is of a newer version of MiMatrix (revision {now}); install that version, or use "
                "another database"
            )
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _shown(address: str) -> str:
    """Return the address without its password."""
    try:
        return make_url(address).render_as_string(hide_password=True)
    except ArgumentError:
        return "given"
