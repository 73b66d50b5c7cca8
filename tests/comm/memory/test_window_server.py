"""The local socket that hands out windows: nobody but the own user is read, and nobody delays anybody."""

import os
import pwd
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.core.errors import WorldError

VISITORS = 60
HOLD = f"""
import os, socket, sys

if sys.argv[2]:  # after Python has been loaded, whose files the user may not be allowed to read
    os.setuid(int(sys.argv[2]))
lines = []
for _ in range({VISITORS}):
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect("\\0" + sys.argv[1])
    lines.append(line)
print("connected", flush=True)
sys.stdin.readline()
for line in lines:
    line.settimeout(0.5)
    try:
        print("closed" if line.recv(10) == b"" else "answered")
    except ConnectionError:
        print("closed")
    except TimeoutError:
        print("open")
"""


@pytest.fixture
def windows() -> Iterator[MemfdWindows]:
    made = MemfdWindows()
    yield made
    made.close()


@contextmanager
def visitors(name: str, user: str = "") -> Iterator["subprocess.Popen[str]"]:
    """Run a process of a user that connects many times, sends nothing, and keeps its connections open."""
    uid = str(pwd.getpwnam(user).pw_uid) if user else ""
    command = [sys.executable, "-I", "-S", "-c", HOLD, name, uid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_window_opens_at_once_while_another_user_holds_connections(windows: MemfdWindows) -> None:
    window = windows.allocate(100)
    window.bytes[3] = 7
    name = window.handle().partition(":")[0]
    with visitors(name, "nobody") as process:
        started = time.monotonic()
        peer = windows.open(window.handle())
        assert time.monotonic() - started < 1
        assert peer.view(3, 4).tolist() == [7]
        output, _ = process.communicate("\n", timeout=60)
        assert output.split() == ["closed"] * VISITORS, "without reading anything"
        peer.close()


def test_window_opens_at_once_while_processes_of_the_own_user_are_silent(windows: MemfdWindows) -> None:
    window = windows.allocate(100)
    with visitors(window.handle().partition(":")[0]):
        started = time.monotonic()
        windows.open(window.handle()).close()
        assert time.monotonic() - started < 1


def receive(handle: str) -> int:
    """Return the descriptor of a window, as a peer gets it."""
    name, _, token = handle.rpartition(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"\0{name}")
        client.send(token.encode())
        _, (descriptor,), _, _ = socket.recv_fds(client, 8, 1)
    return int(descriptor)


def test_window_cannot_be_shrunk(windows: MemfdWindows) -> None:
    """A peer that touches pages beyond the end of a file is killed by SIGBUS."""
    descriptor = receive(windows.allocate(10_000).handle())
    try:
        for size in (0, 9_999, 20_000):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        assert os.fstat(descriptor).st_size == 10_000
    finally:
        os.close(descriptor)


def test_window_that_may_shrink_is_refused(windows: MemfdWindows) -> None:
    """A peer maps nothing that a process which is not ours has offered without seals."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        name = f"mimatrix-test-{os.getpid()}-{time.monotonic_ns()}"
        listener.bind(f"\0{name}")
        listener.listen()
        descriptor = os.memfd_create("unsealed")
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, 4096)
        opening = stack.enter_context(ThreadPoolExecutor(1)).submit(windows.open, f"{name}:token")
        client = stack.enter_context(listener.accept()[0])
        socket.send_fds(client, [struct.pack("<Q", 4096)], [descriptor])
        with pytest.raises(WorldError, match="is smaller than announced, or may become so"):
            opening.result(20)
