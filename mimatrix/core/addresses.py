"""Which of this machine's addresses leads to another machine, and which interface has an address."""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFCONF = 0x8912
_NAME_BYTES = 16
# `struct ifreq`: a name, and a union whose largest member is `struct ifmap`.
_IFREQ_BYTES = _NAME_BYTES + (24 if struct.calcsize("P") == 8 else 16)
_INTERFACES = Path("/sys/class/net")


def local_address(host: str, port: int = 9, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Return the address of the interface from which packets to `host` would leave.

    A connected datagram socket knows it without sending anything.

    Raises:
        OSError: `host` cannot be resolved, or there is no route to it.
    """
    resolved_family, kind, _, _, target = socket.getaddrinfo(host, port, family, type=socket.SOCK_DGRAM)[0]
    with socket.socket(resolved_family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address; False for names, which are not resolved."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str | None:
    """Return the interface that has an IPv4 address, or None if there is none or it is not an IPv4 address.

    An address with a label such as `eth0:1` belongs to the interface `eth0`. Of several interfaces with the same
    address, one that leads to other machines is preferred to loopback.
    """
    names = [name for name, own in _ipv4_addresses() if own == address]
    return next((name for name in names if name != "lo"), names[0] if names else None)


def interface_speed(interface: str, folder: Path = _INTERFACES) -> int | None:
    """Return the speed of an interface's link in Mbit/s, or None if the driver does not know it."""
    try:
        speed = int((folder / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    """Yield each interface's name and IPv4 address, once per address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Without a buffer the kernel only says how many bytes it would write.
        needed, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", 0, 0)))
        buffer = array.array("B", bytes(needed))
        request = struct.pack("iP", needed, buffer.buffer_info()[0])
        written, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    entries = buffer.tobytes()
    for start in range(0, written - _IFREQ_BYTES + 1, _IFREQ_BYTES):
        label = entries[start : start + _NAME_BYTES].split(b"\0")[0].decode()
        # `struct sockaddr_in`: two bytes each of family and port, then the address.
        number = entries[start + _NAME_BYTES + 4 : start + _NAME_BYTES + 8]
        yield label.partition(":")[0], socket.inet_ntoa(number)
