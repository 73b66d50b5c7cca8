"""The database: made, upgraded, and refused where it is newer or none."""

from pathlib import Path

import pytest
from sqlalchemy import inspect, text
from support.databases import database, postgresql

from mimatrix.core.errors import UserError, WorldError
from mimatrix.server.db.engine import address_in, opened
from mimatrix.server.db.models import Base

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
