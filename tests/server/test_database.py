"""The database: made, upgraded, and refused where it is newer or none."""

from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, inspect, text
from support.databases import database, postgresql

from mimatrix.core.errors import UserError, WorldError
from mimatrix.server import db
from mimatrix.server.db.engine import address_in, opened
from mimatrix.server.db.models import AllocationRow, Base, JobRow, NodeRow

__all__ = ["database", "postgresql"]  # fixtures, for pytest to find


def test_migrations_make_the_tables_that_are_described(tmp_path: Path, database: str) -> None:
    engine, _ = opened(database or address_in(tmp_path))
    found = inspect(engine)
    for table in Base.metadata.tables.values():
        columns = {column["name"]: column["nullable"] for column in found.get_columns(table.name)}
        assert columns == {column.name: column.nullable for column in table.columns}
        indexed = {tuple(index["column_names"]) for index in found.get_indexes(table.name)}
        assert {tuple(column.name for column in index.columns) for index in table.indexes} <= indexed
    engine.dispose()
    opened(database or address_in(tmp_path))[0].dispose()  # a second time nothing is to do


def test_an_older_database_keeps_what_is_in_columns_that_are_renamed(tmp_path: Path, database: str) -> None:
    address = database or address_in(tmp_path)
    engine = create_engine(address.replace("postgresql://", "postgresql+psycopg://"))
    config = Config()
    config.set_main_option("script_location", str(Path(db.__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0005")
        connection.execute(
            text(
                """INSERT INTO jobs (id, name, "user", state, reason, script, arguments, environment, snapshot, devices,
                priority, preemptible, retries, retried, generation, seats, leaving, leaving_at, created_at,
                waiting_since, progress) VALUES (1, 'x', 'ann', 'training', '', 'x.py', '[]', '{}', 'abc', '1', 50,
                true, 3, 2, 1, '["n/0"]', 'preempt', 7, 1, 1, '{}')"""
            )
        )
        connection.execute(
            text("INSERT INTO nodes (name, address, near, devices, seen_at) VALUES ('n','a','r','{}',1)")
        )
        connection.execute(
            text("INSERT INTO stints (id, seat, job, generation, started_at) VALUES (1, 'n/0', 1, 1, 1)")
        )
    engine.dispose()
    engine, sessions = opened(address)
    with sessions() as session:
        job, node, held = session.get_one(JobRow, 1), session.get_one(NodeRow, "n"), session.get_one(AllocationRow, 1)
    engine.dispose()
    assert (job.allocation, job.code_archive, job.max_restarts, job.restarts) == (["n/0"], "abc", 3, 2)
    assert (job.stop_kind, job.stop_requested_at, node.rack, held.device) == ("preempt", 7.0, "r", "n/0")


def test_a_newer_database_is_refused(tmp_path: Path, database: str) -> None:
    address = database or address_in(tmp_path)
    engine, _ = opened(address)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(UserError, match=r"of a newer version of MiMatrix \(revision 9999\); install that version"):
        opened(address)


def test_what_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the address of a database"):
        opened("nonsense")
    with pytest.raises(UserError, match="is of an unknown kind"):
        opened("mysql://x@y/z")
    with pytest.raises(WorldError, match="cannot be used"):
        opened("postgresql://x:secret@127.0.0.1:9/z")
    with pytest.raises(WorldError) as found:
        opened("postgresql://x:secret@127.0.0.1:9/z")
    assert "secret" not in str(found.value)
    (tmp_path / "mimatrix.db").write_bytes(b"this is no database at all, is it?" * 100)
    with pytest.raises(WorldError, match="cannot be used"):
        opened(address_in(tmp_path))
