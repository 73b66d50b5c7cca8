"""The store of torch.distributed, which answers everyone who reaches its port: here it listens on one address only."""

import ipaddress
import os
import socket
from collections.abc import Mapping

from torch._C._distributed_c10d import TCPStore


def serve_store(environ: Mapping[str, str] = os.environ) -> TCPStore | None:
    """Serve the job's store on `MASTER_ADDR` alone, if this is the rank that serves it; torch takes all interfaces.

    Keep what is returned until `init_process_group` is called, which then uses this store instead of a new one.

    Returns:
        The store. None if another process serves it, or if it cannot be bound: `MASTER_ADDR` is a name, which other
        hosts may resolve to another address, or it is not an address of this host. Then torch does as it always does.
    """
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if environ.get("RANK") != "0" or by_agent or not port.isdecimal() or not _is_address(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, int(port)), family=family, backlog=1024)
    except OSError:
        return None
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False
