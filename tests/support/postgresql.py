"""A PostgreSQL of our own for a while: on loopback, in a folder of its own, gone afterwards."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

_USER = "nobody"
"""It does not run as root."""


def is_there() -> bool:
    """Whether its programs are installed."""
    return all(shutil.which(name) for name in ("initdb", "pg_ctl"))


@contextmanager
def running() -> Iterator[str]:
    """Yield the address of an empty server, to which the name of a database is to be added: `postgres` is one."""
    folder = Path(mkdtemp(prefix="mimatrix-postgresql-"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    as_user, data = _as_user(folder), str(folder / "data")
    _run([*as_user, "initdb", "-D", data, "-U", "mimatrix", "-A", "trust", "--no-sync"])
    options = f"-p {port} -k {folder} -h 127.0.0.1 -c fsync=off"
    _run([*as_user, "pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start"])
    try:
        yield f"postgresql://mimatrix@127.0.0.1:{port}"
    finally:
        _run([*as_user, "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"])
        shutil.rmtree(folder)


def _as_user(folder: Path) -> list[str]:
    if os.geteuid() != 0:
        return []
    owner = pwd.getpwnam(_USER)
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    return ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
