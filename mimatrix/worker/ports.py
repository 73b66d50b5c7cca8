"""Ports that are still free when somebody comes to listen on them."""

import random
import socket
from pathlib import Path

# What the kernel hands out to connections that go out, and where to read it.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _TRIES = 15_000, 200


def free_port(address: str = "", taken: set[int] | None = None) -> int:
    """One that nobody listens on, outside of those that the kernel gives to outgoing connections.

    Between this answer and the moment in which a rank listens lie seconds (torch is imported there). A port of the
    kernel's own range is now and then given away in them.
    """
    taken = set() if taken is None else taken
    first, last = _range()
    for _ in range(_TRIES if last > first else 0):
        port = random.randint(first, last)  # noqa: S311 (nothing to keep secret)
        if port not in taken and _is_free(address, port):
            taken.add(port)
            return port
    while True:
        with _socket(address) as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            taken.add(port)
            return port


def _range() -> tuple[int, int]:
    try:
        start, end = (int(word) for word in _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return 0, 0
    below, above = (_FIRST, start - 1), (end + 1, 65_535)
    return below if below[1] - below[0] >= above[1] - above[0] else above


def _is_free(address: str, port: int) -> bool:
    try:
        with _socket(address) as probe:
            probe.bind((address, port))
    except OSError:
        return False
    return True


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
