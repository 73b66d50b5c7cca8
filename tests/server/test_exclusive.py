"""One server per data directory and database, and SQLite only where its locks hold."""

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from support.databases import database, postgresql
from support.servers import ServerProcess, end_all

from mimatrix.api.models import ENDED
from mimatrix.core.errors import UserError
from mimatrix.server.db import exclusive
from mimatrix.server.db.engine import opened
from mimatrix.server.db.exclusive import (
    DatabaseTakenError,
    check_local,
    exclusive_file,
    exclusive_use,
    file_system_of,
)

__all__ = ["database", "postgresql"]
MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /srv/shared rw,relatime shared:9 - nfs4 filer:/x rw,vers=4.2
31 22 0:41 / /srv/with\\040space rw - fuse.sshfs me@host: rw
32 22 0:42 / /lustre rw - lustre mds:/scratch rw
34 22 0:43 / /srv/größe rw - nfs4 filer:/y rw
35 22 0:44 / /srv/wide　space and\\134line rw - cifs //host/z rw
33 30 8:2 / /srv/shared/local rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/srv/shared/mimatrix", "nfs4"),
        ("/srv/with space/x", "fuse.sshfs"),
        ("/srv/größe/x", "nfs4"),
        ("/srv/wide\u3000space\u2028and\\line/x", "cifs"),
        ("/lustre", "lustre"),
        ("/srv/shared/local/x", "xfs"),
        ("/srv/sharedness", "ext4"),
    ],
)
def test_the_file_system_of_a_directory(folder: str, kind: str) -> None:
    assert file_system_of(Path(folder), MOUNTS) == kind


@pytest.mark.parametrize("folder", ["/srv/shared/mimatrix", "/srv/with space/x", "/lustre/y"])
def test_sqlite_on_a_network_file_system_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match=r"is on a network file system .* give --data a local directory"):
        check_local(Path(folder), MOUNTS)


def test_sqlite_on_a_local_file_system_is_accepted(tmp_path: Path) -> None:
    check_local(Path("/srv/shared/local"), MOUNTS)
    check_local(tmp_path)
    assert file_system_of(tmp_path, Path("/proc/self/mountinfo").read_text())


def test_two_servers_on_one_sqlite_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "x.db")
    with exclusive_file(f"sqlite:///{tmp_path}/x.db"):
        engine, sessions = opened(f"sqlite:///{tmp_path}/x.db")
        assert stat.S_IMODE((tmp_path / "x.db").stat().st_mode) == 0o600
        for name in ("x.db", "link.db"):
            with (
                pytest.raises(UserError, match=r"another server uses the database .*x\.db"),
                exclusive_file(f"sqlite:///{tmp_path}/{name}"),
            ):
                pass
        with sessions.begin() as session:
            session.execute(text("CREATE TABLE after (x INTEGER)"))
        engine.dispose()
    with exclusive_file(f"sqlite:///{tmp_path}/link.db"):
        pass


def test_sqlite_given_by_its_address_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"{MOUNTS}36 22 0:45 / {tmp_path} rw - nfs4 filer:/z rw\n")
    monkeypatch.setattr(exclusive, "_MOUNTS", mounts)
    with pytest.raises(UserError, match=r"network file system .* give --database a local file, or use"):
        exclusive_file(f"sqlite:///{tmp_path}/x.db").__enter__()
    for address in ("sqlite://", "sqlite:///:memory:", "sqlite:////x.db?nolock=1", "sqlite:///file:x?uri=true"):
        with pytest.raises(UserError, match="is not a file; write sqlite:"):
            exclusive_file(address).__enter__()
    with pytest.raises(UserError, match="cannot be opened"):
        exclusive_file("sqlite:////nowhere/x.db").__enter__()
    with exclusive_file("postgresql://host/x"), exclusive_file("nonsense"):
        pass


@pytest.mark.timeout(120)
def test_server_refuses_the_sqlite_file_of_another(tmp_path: Path) -> None:
    database = ("--database", f"sqlite:///{tmp_path}/x.db")
    up = ServerProcess(tmp_path / "one", *database).start()
    try:
        other = ServerProcess(tmp_path / "two", *database)
        with pytest.raises(AssertionError, match="another server uses the database"):
            other.start()
        assert other.process
        assert other.process.wait(timeout=10) == 2
    finally:
        up.kill(signal.SIGTERM)


def test_two_servers_on_one_postgresql_database_are_refused(postgresql: str) -> None:
    with (
        engine_on(postgresql) as engine,
        engine_on(postgresql) as other,
    ):
        with (
            exclusive_use(engine),
            pytest.raises(UserError, match="another server uses this database"),
            exclusive_use(other),
        ):
            pass
        with exclusive_use(other):
            pass


def test_lost_lock_of_postgresql_is_taken_again(postgresql: str) -> None:
    with engine_on(postgresql) as engine, engine_on(postgresql) as other, exclusive_use(engine) as check:
        check()
        drop_connections(postgresql)
        check()
        check()
        with pytest.raises(UserError, match="another server uses this database"), exclusive_use(other):
            pass


def test_lock_that_a_dead_connection_still_holds_is_taken_again(postgresql: str) -> None:
    """As when a firewall drops an idle connection: PostgreSQL does not notice, and keeps its lock."""
    with (
        Firewall(int(postgresql.rsplit(":", 1)[1])) as firewall,
        engine_on(firewall.address) as engine,
        exclusive_use(engine) as check,
    ):
        firewall.drop()
        check()
        check()


def test_lock_of_postgresql_that_another_server_took_is_an_error(postgresql: str) -> None:
    with engine_on(postgresql) as engine, engine_on(postgresql) as other, exclusive_use(engine) as check:
        drop_connections(postgresql)
        with exclusive_use(other), pytest.raises(DatabaseTakenError, match="another server uses it now"):
            check()
        check()


@pytest.mark.timeout(120)
@pytest.mark.wording
def test_server_whose_database_was_taken_ends(postgresql: str, tmp_path: Path) -> None:
    up = ServerProcess(tmp_path / "data", "--database", f"{postgresql}/postgres").start()
    assert up.process
    try:
        drop_connections(postgresql)
        up.until(up.submit("hello.py"), lambda job: job.state in ENDED)  # it has the lock again
        up.process.send_signal(signal.SIGSTOP)
        drop_connections(postgresql)
        with engine_on(postgresql) as engine, exclusive_use(engine):
            up.process.send_signal(signal.SIGCONT)
            assert up.process.wait(timeout=40) == 1
    finally:
        if up.process.poll() is None:
            up.kill()
        end_all(up.data)
    assert up.said().splitlines()[-1].startswith("mimatrix: this server lost its connection to the database, and")


class Firewall:
    """Passes connections on to a local port; those that it drops end for the client alone."""

    def __init__(self, port: int) -> None:
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self._clients: list[socket.socket] = []
        self._streams: list[socket.socket] = []
        self.address = f"postgresql://mimatrix@127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Firewall":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self._listener, *self._clients, *self._streams):
            with suppress(OSError):  # which one that reads it would not notice otherwise
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()

    def drop(self) -> None:
        for client in self._clients:
            client.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, server = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._clients.append(client)
                self._streams.append(server)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)


@contextmanager
def engine_on(address: str) -> Iterator[Engine]:
    engine, _ = opened(f"{address}/postgres")
    yield engine
    engine.dispose()


def drop_connections(address: str) -> None:
    """End all connections to a database, as a restart of PostgreSQL does."""
    import psycopg

    others = "FROM pg_stat_activity WHERE datname = 'postgres' AND pid <> pg_backend_pid()"
    with psycopg.connect(f"{address}/postgres", autocommit=True) as connection:
        connection.execute(f"SELECT pg_terminate_backend(pid) {others}".encode())
        deadline_s = time.monotonic() + 10
        while connection.execute(f"SELECT count(*) {others}".encode()).fetchone() != (0,):
            assert time.monotonic() < deadline_s


def test_checkpoints_are_apart_from_the_data(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    up = ServerProcess(tmp_path / "data", "--checkpoints", str(shared)).start()
    try:
        number = up.submit("hello.py")
        up.until(number, lambda job: job.state in ("done", "failed"))
        assert [path.name for path in shared.iterdir()] == [f"job-{number}"]
        assert not (up.data / "checkpoints").exists()
    finally:
        up.kill(signal.SIGTERM)


def test_the_limit_of_open_files_is_raised_at_the_start(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        up = ServerProcess(tmp_path / "data").start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        assert up.process
        soft, _ = resource.prlimit(up.process.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard if hard != resource.RLIM_INFINITY else 65_536, 65_536)
    finally:
        up.kill(signal.SIGTERM)


def test_the_token_is_printed_only_to_a_terminal(tmp_path: Path) -> None:
    """Under a terminal it is shown; test_server_process has the case of a log."""
    data = tmp_path / "data"
    main, terminal = os.openpty()
    words = [sys.executable, "-m", "mimatrix.cli.main", "up", "--data", str(data), "--port", "0", "--devices", "1"]
    words[words.index("0")] = "17799"
    process = subprocess.Popen(words, stderr=terminal, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(terminal)
    said = b""
    try:
        while b"dashboard:" not in said:
            said += os.read(main, 4096)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(main)
    assert (data / "token").read_text().strip() in said.decode()
