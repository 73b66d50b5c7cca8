"""The contract's reads over a network: each rank in a network namespace, with nothing but a cable in between."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.window_ranks import READ_S, ProcessRank, RankProcess, WindowRank
from test_window_contract import (
    test_a_closed_window_does_not_open,
    test_ranges_are_read_exactly,
    test_ranks_read_from_each_other_at_once,
    test_several_peers_read_at_once,
    test_windows_of_one_rank_do_not_mix,
    test_writes_after_opening_are_seen,
)

from mimatrix.comm.memory.nixl import nixl_available
from mimatrix.core.errors import WorldError

__all__ = [
    "test_a_closed_window_does_not_open",
    "test_ranges_are_read_exactly",
    "test_ranks_read_from_each_other_at_once",
    "test_several_peers_read_at_once",
    "test_windows_of_one_rank_do_not_mix",
    "test_writes_after_opening_are_seen",
]
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not nixl_available(), reason="NIXL is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
NAMES = [f"mmxw{os.getpid()}{end}" for end in "ab"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two namespaces and a cable; the names are also those of the cable's ends."""
    with ExitStack() as stack:
        for name in NAMES:
            _ip(f"netns add {name}")
            stack.callback(_ip, f"netns delete {name}")
        _ip(f"link add {NAMES[0]} netns {NAMES[0]} type veth peer name {NAMES[1]} netns {NAMES[1]}")
        for number, name in enumerate(NAMES, start=1):
            _ip(f"-n {name} address add 10.213.7.{number}/24 dev {name}")
            # UCX waits without end for a host whose loopback is down.
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {name} up")
        yield NAMES


@pytest.fixture(scope="module")
def ranks(hosts: list[str]) -> Iterator[list[WindowRank]]:
    """Yield the owner on one host and a reader on each."""
    first, second = hosts
    with ExitStack() as stack:
        programs = [RankProcess(["ip", "netns", "exec", name]) for name in (first, second, first)]
        for program in programs:
            stack.callback(program.end)
        yield [ProcessRank(program, "nixl") for program in programs]


def test_a_cable_that_is_pulled(ranks: list[WindowRank], hosts: list[str]) -> None:
    owner, reader, neighbour = ranks
    window = owner.do("allocate", 1 << 20)
    owner.do("write", window, 0, "abcd")
    handle = owner.do("handle", window)
    peers = [rank.do("open", handle) for rank in (reader, neighbour)]
    _ip(f"-n {hosts[1]} link set {hosts[1]} down")
    try:
        with pytest.raises(WorldError, match=r"did not give bytes 0 to 1048576 .*; is its host reachable\?"):
            reader.do("read", peers[0], 0, 1 << 20)
        assert neighbour.do("read", peers[1], 0, 2) == "abcd"
    finally:
        _ip(f"-n {hosts[1]} link set {hosts[1]} up")
    assert _patiently_read(reader, peers[0]) == "abcd"


def _patiently_read(rank: WindowRank, peer: int) -> str:
    """TCP tries again after twice the time each time: what comes back may take as long as it was away."""
    for _ in range(3):
        try:
            return str(rank.do("read", peer, 0, 2))
        except WorldError:
            continue
    raise AssertionError(f"nothing came in {3 * READ_S} s after the cable was back")


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=20)
    if done.returncode and "add" in words:
        pytest.skip(f"`ip {words}` failed: {done.stderr.strip()}")
