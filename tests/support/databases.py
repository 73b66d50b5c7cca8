"""Databases for tests: SQLite in a folder, and a real PostgreSQL of this run's own, where its programs are there."""

import os
from collections.abc import Iterator

import pytest

from support import postgresql as own


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Yield the address of an empty server."""
    if not own.is_there():
        pytest.skip("needs PostgreSQL")
    with own.running() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """Return the address of an empty database of each kind; empty for SQLite, which is made where it is wanted."""
    if request.param == "sqlite":
        return ""
    import psycopg

    address: str = request.getfixturevalue("postgresql")
    name = f"test_{os.getpid()}_{abs(hash(request.node.nodeid)) % 10**9}"
    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{address}/{name}"
