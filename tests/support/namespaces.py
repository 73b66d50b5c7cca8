"""Hosts that are network namespaces on one bridge, whose cables a test can cut. They need root."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@dataclass(frozen=True)
class CableHost:
    """One namespace and its address."""

    space: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return what runs `words` on this host."""
        return ["ip", "netns", "exec", self.space, *words]

    def cut(self) -> None:
        """Take its link down: packets vanish without an answer."""
        # At the switch's end: the host itself notices nothing, as with a cable that is pulled behind the next switch.
        _ip(f"-n {self.space[:-1]}s link set {self.space} down")


@contextmanager
def cabled_hosts(count: int, prefix: str = "10.213.9") -> Iterator[Sequence[CableHost]]:
    """Make hosts that reach each other over a switch, itself in a namespace, and remove them in the end."""
    base = f"mmxc{os.getpid()}"
    switch = f"{base}s"
    with ExitStack() as stack:
        _add_namespace(stack, switch)
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        hosts = [CableHost(f"{base}{'abcdefgh'[n]}", f"{prefix}.{n + 1}") for n in range(count)]
        for host in hosts:
            _add_namespace(stack, host.space)
            _ip(f"link add eth0 netns {host.space} type veth peer name {host.space} netns {switch}")
            _ip(f"-n {switch} link set {host.space} master bridge up")
            _ip(f"-n {host.space} address add {host.address}/24 dev eth0")
            _ip(f"-n {host.space} link set lo up")
            _ip(f"-n {host.space} link set eth0 up")
        yield hosts


def _add_namespace(stack: ExitStack, space: str) -> None:
    _ip(f"netns add {space}")
    stack.callback(_ip, f"netns delete {space}")


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=20)
    if done.returncode and "add" in words:
        pytest.skip(f"`ip {words}` failed: {done.stderr.strip()}")
