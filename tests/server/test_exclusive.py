"""One server per data directory and database, and SQLite only where its locks hold."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.databases import database, postgresql
from support.servers import Server

from mimatrix.core.errors import UserError
from mimatrix.server.db.engine import opened
from mimatrix.server.db.exclusive import check_local, exclusive_use, file_system_of

__all__ = ["database", "postgresql"]
MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /srv/shared rw,relatime shared:9 - nfs4 filer:/x rw,vers=4.2
31 22 0:41 / /srv/with\\040space rw - fuse.sshfs me@host: rw
32 22 0:42 / /lustre rw - lustre mds:/scratch rw
33 30 8:2 / /srv/shared/local rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/srv/shared/mimatrix", "nfs4"),
        ("/srv/with space/x", "fuse.sshfs"),
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


def test_two_servers_on_one_postgresql_database_are_refused(postgresql: str) -> None:
    engine, _ = opened(f"{postgresql}/postgres")
    other, _ = opened(f"{postgresql}/postgres")
    with (
        exclusive_use(engine),
        pytest.raises(UserError, match="another server uses this database"),
        exclusive_use(other),
    ):
        pass
    with exclusive_use(other):
        pass
    engine.dispose()
    other.dispose()


def test_checkpoints_are_apart_from_the_data(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    up = Server(tmp_path / "data", "--checkpoints", str(shared)).start()
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
        up = Server(tmp_path / "data").start()
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
