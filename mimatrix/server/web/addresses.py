"""Addresses of this machine, and which of them other machines can use."""

import ipaddress
import socket
from contextlib import suppress

from mimatrix.core.addresses import local_address


def own_address(prefers_six: bool) -> str:
    """Return the address by which other machines reach this one, or an empty text; nothing is sent for that."""
    addresses = [_outward(socket.AF_INET6, "2001:db8::1"), _outward(socket.AF_INET, "192.0.2.1")]
    if not prefers_six:
        addresses = addresses[1:]  # a listener on 0.0.0.0 does not accept IPv6
    with suppress(OSError):
        family = socket.AF_UNSPEC if prefers_six else socket.AF_INET
        addresses += [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, family)]
    return next((address for address in addresses if _is_for_others(address)), "")


def is_any(host: str) -> bool:
    """Return whether listening on this host means all addresses."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _outward(family: socket.AddressFamily, far: str) -> str:
    """Return the source address of packets to `far`."""
    try:
        return local_address(far, family=family)
    except OSError:
        return ""


def _is_for_others(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_link_local or found.is_unspecified or found.is_multicast)
