"""Ports that are still free when a rank starts to listen on them."""

import random
import socket
from pathlib import Path

# The range from which the kernel takes ports for outgoing connections.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _TRIES = 15_000, 200
# Not the global generator, which is the script's, and may be seeded alike in several processes.
_CHANCE = random.SystemRandom()


def free_port(address: str = "", taken: set[int] | None = None) -> int:
    """Return a free port outside the range that the kernel uses for outgoing connections.

    Seconds pass between this call and the moment in which a rank listens, since torch is imported in between. In that
    time the kernel may use a port of its own range.

    Args:
        address: The address to listen on; all if empty.
        taken: Ports not to return; the new one is added.
    """
    taken = set() if taken is None else taken
    first, last = _port_range()
    for _ in range(_TRIES if last > first else 0):
        port = _CHANCE.randint(first, last)
        if port not in taken and _is_free(address, port):
            taken.add(port)
            return port
    while True:
        with _open_socket(address) as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            taken.add(port)
            return port


def _port_range() -> tuple[int, int]:
    """Return the larger of the ranges below and above the kernel's, or an empty one if that is unknown."""
    try:
        start, end = (int(number) for number in _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return 0, 0
    below, above = (_FIRST, start - 1), (end + 1, 65_535)
    return below if below[1] - below[0] >= above[1] - above[0] else above


def _is_free(address: str, port: int) -> bool:
    try:
        with _open_socket(address) as probe:
            probe.bind((address, port))
    except OSError:
        return False
    return True


def _open_socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
