"""Databases for tests: SQLite in a folder, and a real PostgreSQL of this run's own, where its programs are there."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

_USER = "nobody"
"""PostgreSQL does not run as root."""


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The address of an empty server; databases in it are made by `fresh`."""
    programs = [shutil.which(name) for name in ("initdb", "pg_ctl")]
    if not all(programs):
        pytest.skip("needs PostgreSQL")
    # Not one of pytest's folders, which are for their owner alone.
    folder = Path(mkdtemp(prefix="mimatrix-postgresql-"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    as_user = _as_user(folder)
    initdb, pg_ctl = map(str, programs)
    _run([*as_user, initdb, "-D", str(folder / "data"), "-U", "mimatrix", "-A", "trust", "--no-sync"])
    options = f"-p {port} -k {folder} -h 127.0.0.1 -c fsync=off"
    _run([*as_user, pg_ctl, "-D", str(folder / "data"), "-o", options, "-l", str(folder / "log"), "-w", "start"])
    try:
        yield f"postgresql://mimatrix@127.0.0.1:{port}"
    finally:
        _run([*as_user, pg_ctl, "-D", str(folder / "data"), "-m", "immediate", "-w", "stop"])
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """The address of an empty database of each kind; nothing for SQLite, which is made where it is wanted."""
    if request.param == "sqlite":
        return ""
    import psycopg

    address: str = request.getfixturevalue("postgresql")
    name = f"test_{os.getpid()}_{abs(hash(request.node.nodeid)) % 10**9}"
    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{address}/{name}"


def _as_user(folder: Path) -> list[str]:
    if os.geteuid() != 0:
        return []
    owner = pwd.getpwnam(_USER)
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    return ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
