"""What the hostile soak attacks: every socket on which a process listens."""

import os
import socket

import pytest
from support.hostile import OpenSocket, listeners_of


@pytest.mark.parametrize(
    ("family", "bound", "reached"),
    [
        (socket.AF_INET, "127.0.0.3", "127.0.0.3"),
        (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "::1"),
    ],
)
def test_listeners_of_both_families_are_found_and_reached(family: int, bound: str, reached: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((bound, 0))
        except OSError:
            pytest.skip("needs IPv6")
        listener.listen()
        port = listener.getsockname()[1]
        (found,) = [one for one in listeners_of([os.getpid()]) if one.port == port]
        assert (found.pid, found.host) == (os.getpid(), reached)
        with found.connect():
            listener.accept()[0].close()


def test_listeners_of_unix_sockets_are_found() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0hostile-{os.getpid()}")
        listener.listen()
        paths = [one.path for one in listeners_of([os.getpid()]) if one.path]
        assert paths == [f"@hostile-{os.getpid()}"]
        with OpenSocket(os.getpid(), "", path=paths[0]).connect():
            listener.accept()[0].close()
