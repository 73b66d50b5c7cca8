"""Measure the network between ranks: latency and rate of every pair.

Pairs are measured in rounds in which every rank has at most one partner. Between hosts, one rank of each host sends at
a time, since ranks of a host share its NIC and each would see a part of it. Which one sends changes between rounds.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.c10d import C10dBackend
from mimatrix.comm.group import Group
from mimatrix.core.errors import PeerLost
from mimatrix.core.hosts import ranks_by_host

Pair = tuple[int, int]
Matrix = tuple[tuple[float, ...], ...]

_PINGS, _WARM_UPS = 20, 3
_MIN_BYTES, _MAX_BYTES = 1 << 20, 64 << 20
_GROWTH = 4
_LONG_S = 0.05
"""A transfer that takes this long shows the rate of a link."""
_TAG = 1_117


@dataclass(frozen=True, slots=True)
class Links:
    """One-way `latency_s[a][b]` and `rate_bytes_per_s[a][b]` from rank a to rank b; both 0 from a rank to itself."""

    latency_s: Matrix
    rate_bytes_per_s: Matrix

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.latency_s)


def measure_links(
    group: Group | dist.ProcessGroup, hosts: Sequence[str], device: torch.device | None = None, deadline_s: float = 60.0
) -> Links:
    """Measure all links of a group. A collective: every rank calls it and gets the same result.

    Args:
        group: The ranks.
        hosts: The name of the host of every rank.
        device: Where the tensors lie; on a GPU, NCCL sends them if it serves the group. Default: the CPU.
        deadline_s: No wait is longer.

    Raises:
        PeerLost: A rank did not answer in time.
    """
    where = device or torch.device("cpu")
    backend, rank, size = _backend_of(group, where)
    probe = _PairProbe(backend, rank, where, deadline_s)
    native = C10dBackend(backend, rank, size, deadline_s)
    results = torch.zeros(2, size, size, dtype=torch.float64, device=where)
    for pairs in probe_rounds(hosts):
        for pair in pairs:
            if rank in pair:
                peer = pair[0] + pair[1] - rank
                results[0, rank, peer], results[1, rank, peer] = probe.measure(peer, first=rank == pair[0])
        _all_reduce(native, results.new_zeros(1))
    _all_reduce(native, results)
    latency, rate = (_fill_pairs(table.tolist(), hosts) for table in results)
    return Links(latency, rate)


def probe_rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Return the pairs of each round: every two ranks of a host, and every two hosts."""
    members = ranks_by_host(hosts)
    names = list(members)
    between = [
        [_senders(members[names[a]], members[names[b]], number) for a, b in pairs]
        for number, pairs in enumerate(round_robin(len(names)))
    ]
    inside = [
        [[(ranks[a], ranks[b]) for a, b in pairs] for pairs in round_robin(len(ranks))] for ranks in members.values()
    ]
    # Hosts with fewer ranks finish before the others.
    merged = [[pair for pairs in by_host for pair in pairs] for by_host in zip_longest(*inside, fillvalue=[])]
    return between + merged


def round_robin(count: int) -> Iterator[list[Pair]]:
    """Yield all pairs of `count` players in as few rounds as possible: one stays, the others rotate in a circle."""
    players = list(range(count + count % 2))
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        # With an odd number of players the last one does not exist, and its partner rests.
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        players = [players[0], players[-1], *players[1:-1]]


def _senders(first: Sequence[int], second: Sequence[int], number: int) -> Pair:
    a, b = first[number % len(first)], second[number % len(second)]
    return min(a, b), max(a, b)


def _backend_of(group: Group | dist.ProcessGroup, device: torch.device) -> tuple[Any, int, int]:
    """Return the c10d backend that sends for a kind of device, and the rank and size of the group."""
    if isinstance(group, Group):
        backend = group.backends.get(device.type, group.cpu_backend)
        assert backend, "a group without a c10d backend cannot send"
        return backend.backend, group.rank, group.world_size
    return group._get_backend(device), group.rank(), group.size()


def _all_reduce(native: C10dBackend, table: torch.Tensor) -> None:
    """Sum a table over all ranks; this is also a barrier."""
    native.run(Collective.ALL_REDUCE, table.view(-1), "sum", 0)


def _fill_pairs(table: list[list[float]], hosts: Sequence[str]) -> Matrix:
    """Give pairs that were not measured the values of their hosts."""
    ranks = range(len(hosts))
    by_host = {(hosts[a], hosts[b]): table[a][b] for a in ranks for b in ranks if hosts[a] != hosts[b] and table[a][b]}
    return tuple(
        tuple(table[a][b] or (by_host[hosts[a], hosts[b]] if hosts[a] != hosts[b] else 0.0) for b in ranks)
        for a in ranks
    )


class _PairProbe:
    """One end of the links of this rank."""

    def __init__(self, backend: Any, rank: int, device: torch.device, deadline_s: float) -> None:
        self._backend, self._rank, self._device, self._deadline_s = backend, rank, device, deadline_s
        self._number = torch.zeros(1, dtype=torch.int64, device=device)

    def measure(self, peer: int, first: bool) -> tuple[float, float]:
        """Measure the latency, and the rate to a peer; both ends call it, one of them as the first."""
        latency = self._measure_latency(peer, first)
        if first:
            rate = self._measure_rate(peer, latency)
            self._serve_rate(peer)
            return latency, rate
        self._serve_rate(peer)
        return latency, self._measure_rate(peer, latency)

    def _measure_latency(self, peer: int, first: bool) -> float:
        round_trips = []
        for number in range(_PINGS + _WARM_UPS):
            started = time.perf_counter()
            for step in (self._send, self._receive) if first else (self._receive, self._send):
                step(peer, self._number)
            if number >= _WARM_UPS:
                round_trips.append(time.perf_counter() - started)
        if first:
            self._send_number(peer, round(statistics.median(round_trips) / 2 * 1e9))
            return statistics.median(round_trips) / 2
        # The clock of this end also runs while it waits for the next ping.
        return self._receive_number(peer) / 1e9

    def _measure_rate(self, peer: int, latency_s: float) -> float:
        """Send more and more until a transfer takes long enough."""
        size = _MIN_BYTES
        while True:
            self._send_number(peer, size)
            data = torch.zeros(size, dtype=torch.uint8, device=self._device)
            started = time.perf_counter()
            self._send(peer, data)
            self._receive_number(peer)
            elapsed = max(1e-9, time.perf_counter() - started - 2 * latency_s)
            if elapsed >= _LONG_S or size >= _MAX_BYTES:
                self._send_number(peer, 0)
                return size / elapsed
            size *= _GROWTH

    def _serve_rate(self, peer: int) -> None:
        """Receive what the peer sends in its `_measure_rate`."""
        while size := self._receive_number(peer):
            self._receive(peer, torch.empty(size, dtype=torch.uint8, device=self._device))
            self._send_number(peer, 0)

    def _send_number(self, peer: int, number: int) -> None:
        self._send(peer, self._number.fill_(number))

    def _receive_number(self, peer: int) -> int:
        self._receive(peer, self._number)
        return int(self._number)

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        self._wait(self._backend.send([tensor], peer, _TAG), peer, "receive")

    def _receive(self, peer: int, tensor: torch.Tensor) -> None:
        self._wait(self._backend.recv([tensor], peer, _TAG), peer, "send")

    def _wait(self, work: Any, peer: int, verb: str) -> None:
        since = time.strftime("%H:%M:%S")
        try:
            work.wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise PeerLost(
                f"rank {peer} did not {verb} the probes of its link with rank {self._rank} since {since} ({error}); "
                f"look at the output of rank {peer}",
                peer,
            ) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
