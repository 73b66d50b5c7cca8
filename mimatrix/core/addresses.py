"""Which of this machine's addresses leads to another machine."""

import socket


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
