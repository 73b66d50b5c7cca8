"""At which address the peers reach this rank, and how Gloo and NCCL are told to use it.

A host's own name often resolves to 127.0.1.1, which no other host reaches. So the address is that of the interface from
which packets to the peers leave, whatever the host is called.
"""

import json
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import ProcessGroupGloo, Store

from mimatrix.core import environment
from mimatrix.core.addresses import interface_of, is_loopback, local_address
from mimatrix.core.errors import UserError

_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class HostAddress:
    """The host of a rank, and the address that the rank would take if it did not know its peers."""

    host: str
    address: str


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """The address at which the peers reach this rank, and whether some of them are on other hosts."""

    address: str
    spans_hosts: bool


def own_address() -> str:
    """Return this rank's address as far as it knows alone: MIMATRIX_ADDRESS, or that of the route to MASTER_ADDR."""
    address = environment.ADDRESS.get()
    if address:
        return address
    try:
        return _route_to(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    except OSError:
        return "127.0.0.1"


def find_route(store: Store, rank: int, world_size: int, host: str) -> PeerRoute:
    """Exchange addresses through the store, and return this rank's. A collective, with the store's timeout.

    Args:
        store: The same on all ranks.
        rank: This rank.
        world_size: The number of ranks.
        host: Name of this rank's host; ranks with other names are on other hosts.
    """
    store.set(f"mimatrix/address/{rank}", json.dumps(asdict(HostAddress(host, own_address()))))
    ranks = [HostAddress(**json.loads(store.get(f"mimatrix/address/{peer}"))) for peer in range(world_size)]
    return PeerRoute(choose_address(ranks, rank), spans_hosts=len({each.host for each in ranks}) > 1)


def choose_address(ranks: Sequence[HostAddress], rank: int, route_to: Callable[[str], str] | None = None) -> str:
    """Return the address at which other hosts reach a rank.

    It is the rank's own, unless that is a loopback address and a rank of another host has one that is not: then it is
    that of the route to this other rank.

    Args:
        ranks: Host and address of each rank.
        rank: The rank that asks, which is this process.
        route_to: Returns the local address of the route to a peer, or raises OSError; asks the kernel if omitted.
    """
    own = ranks[rank]
    if not is_loopback(own.address):
        return own.address
    for peer in ranks:
        if peer.host == own.host or is_loopback(peer.address):
            continue
        try:
            address = (route_to or _route_to)(peer.address)
        except OSError:
            continue
        if not is_loopback(address):
            return address
    return own.address


def create_gloo(store: Store, rank: int, world_size: int, timeout: timedelta, address: str) -> ProcessGroupGloo:
    """Return Gloo, which listens on `address`; on the interfaces in GLOO_SOCKET_IFNAME if that is set.

    Raises:
        UserError: This machine does not have the address.
    """
    if os.environ.get(_GLOO_INTERFACE):
        return ProcessGroupGloo(store, rank, world_size, timeout)
    try:
        device = ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        raise UserError(
            f"rank {rank} cannot listen on {address} ({str(error).splitlines()[0]}); set {environment.ADDRESS.name} to "
            "an address of its host, or unset it"
        ) from None
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout, options._threads = [device], timeout, 2
    return ProcessGroupGloo(store, rank, world_size, options)


def set_nccl_interface(route: PeerRoute, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let NCCL use the interface that leads to the peers, if they are on several hosts and the user has named none.

    NCCL reads the variable when a process creates its first communicator, and takes the interface's first address.
    """
    interface = interface_of(route.address)
    if not route.spans_hosts or environ.get(_NCCL_INTERFACE) or interface is None:
        return
    # Routed hosts may have their address on `lo`, of which NCCL would take 127.0.0.1.
    if interface != "lo" or is_loopback(route.address):
        environ[_NCCL_INTERFACE] = f"={interface}"


_route_to = partial(local_address, family=socket.AF_INET)
"""Coordinator and Gloo listen on IPv4 addresses."""
