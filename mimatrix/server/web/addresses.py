"""Addresses of this machine: which of them others can use."""

import ipaddress
import socket
from contextlib import suppress

from mimatrix.core.addresses import local_address


def own_address(prefers_six: bool) -> str:
    """By which others reach this machine, as far as it can tell; nothing is sent for that."""
    found = [_outward(socket.AF_INET6, "2001:db8::1"), _outward(socket.AF_INET, "192.0.2.1")]
    if not prefers_six:
        found = found[1:]  # who listens on 0.0.0.0 does not hear the others
    with suppress(OSError):
        family = socket.AF_UNSPEC if prefers_six else socket.AF_INET
        found += [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, family)]
    return next((address for address in found if _is_for_others(address)), "")


def is_any(host: str) -> bool:
    """Whether listening there means on all addresses."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _outward(family: socket.AddressFamily, far: str) -> str:
    """The address that packets to `far` would come from: of the interface of the default route."""
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
