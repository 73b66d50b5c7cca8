"""What the network between ranks can do: latency and rate of every pair, and the cluster that they make up.

Pairs talk in rounds in which every rank has one partner at most. Between hosts one rank speaks for each host at a time,
or ranks of a host would share its NIC and each see a part of it; who speaks changes from round to round.
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

Pair = tuple[int, int]
Matrix = tuple[tuple[float, ...], ...]

_PINGS, _WARM_UPS = 20, 3
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_GROWS = 4
_LONG_S = 0.05
"""A transfer that takes this long says what the link can do."""
_TAG = 1_117


@dataclass(frozen=True, slots=True)
class Links:
    """`latency_s[a][b]` one way, and `rate_bytes_per_s[a][b]` from a to b; both 0 from a rank to itself."""

    latency_s: Matrix
    rate_bytes_per_s: Matrix

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.latency_s)


def measure_links(
    group: Group | dist.ProcessGroup, hosts: Sequence[str], device: torch.device | None = None, deadline_s: float = 60.0
) -> Links:
    """Measure all links of a group; every rank calls it and gets the same. `hosts[r]` names the host of rank r.

    Tensors lie on `device`; of a GPU, NCCL carries them where it serves the group. No wait is longer than `deadline_s`.
    """
    where = device or torch.device("cpu")
    backend, me, size = _backend_of(group, where)
    line = _PairProbe(backend, me, where, deadline_s)
    native = C10dBackend(backend, me, size, deadline_s)
    found = torch.zeros(2, size, size, dtype=torch.float64, device=where)
    for pairs in rounds(hosts):
        for pair in pairs:
            if me in pair:
                mine, theirs = me, pair[0] + pair[1] - me
                found[0, mine, theirs], found[1, mine, theirs] = line.measured(theirs, first=me == pair[0])
        _meet(native, found.new_zeros(1))
    _meet(native, found)
    latency, rate = (_filled(table.tolist(), hosts) for table in found)
    return Links(latency, rate)


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Who talks to whom in which round: every two ranks of a host, and every two hosts."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    names = list(members)
    between = [
        [_speakers(members[names[a]], members[names[b]], number) for a, b in pairs]
        for number, pairs in enumerate(circle(len(names)))
    ]
    inside = [[[(ranks[a], ranks[b]) for a, b in pairs] for pairs in circle(len(ranks))] for ranks in members.values()]
    # Hosts of fewer ranks have done before the others.
    together = [[pair for pairs in each for pair in pairs] for each in zip_longest(*inside, fillvalue=[])]
    return between + together


def circle(count: int) -> Iterator[list[Pair]]:
    """All pairs of `count` players in as few rounds as possible: one stays, the others walk around in a circle."""
    players = list(range(count + count % 2))
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        # With an odd number of players the last one does not exist, and its partner rests.
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        players = [players[0], players[-1], *players[1:-1]]


def _speakers(first: Sequence[int], second: Sequence[int], number: int) -> Pair:
    a, b = first[number % len(first)], second[number % len(second)]
    return min(a, b), max(a, b)


def _backend_of(group: Group | dist.ProcessGroup, device: torch.device) -> tuple[Any, int, int]:
    """The part of torch that sends for a kind of device, and this rank's place in the group."""
    if isinstance(group, Group):
        backend = group.backends.get(device.type, group.cpu_backend)
        assert backend, "a group without a c10d backend cannot send"
        return backend.backend, group.rank, group.world_size
    return group._get_backend(device), group.rank(), group.size()


def _meet(native: C10dBackend, table: torch.Tensor) -> None:
    """Add up what all have; nobody leaves before all are there."""
    native.run(Collective.ALL_REDUCE, table.view(-1), "sum", 0)


def _filled(table: list[list[float]], hosts: Sequence[str]) -> Matrix:
    """Pairs that did not talk have what their hosts had."""
    ranks = range(len(hosts))
    known = {(hosts[a], hosts[b]): table[a][b] for a in ranks for b in ranks if hosts[a] != hosts[b] and table[a][b]}
    return tuple(
        tuple(table[a][b] or (known[hosts[a], hosts[b]] if hosts[a] != hosts[b] else 0.0) for b in ranks) for a in ranks
    )


class _PairProbe:
    """The end of this rank's links."""

    def __init__(self, backend: Any, me: int, device: torch.device, deadline_s: float) -> None:
        self._backend, self._me, self._device, self._deadline_s = backend, me, device, deadline_s
        self._word = torch.zeros(1, dtype=torch.int64, device=device)

    def measured(self, peer: int, first: bool) -> tuple[float, float]:
        """Latency, and the rate from here to the peer; both ends call it, one of them as the first."""
        latency = self._latency(peer, first)
        if first:
            rate = self._rate(peer, latency)
            self._take(peer)
            return latency, rate
        self._take(peer)
        return latency, self._rate(peer, latency)

    def _latency(self, peer: int, first: bool) -> float:
        took = []
        for number in range(_PINGS + _WARM_UPS):
            started = time.perf_counter()
            for step in (self._send, self._receive) if first else (self._receive, self._send):
                step(peer, self._word)
            if number >= _WARM_UPS:
                took.append(time.perf_counter() - started)
        if first:
            self._tell(peer, round(statistics.median(took) / 2 * 1e9))
            return statistics.median(took) / 2
        # Its own clock runs while it waits for the next ping.
        return self._hear(peer) / 1e9

    def _rate(self, peer: int, latency_s: float) -> float:
        """Send more and more until it takes long enough to tell."""
        size = _LEAST_BYTES
        while True:
            self._tell(peer, size)
            data = torch.zeros(size, dtype=torch.uint8, device=self._device)
            started = time.perf_counter()
            self._send(peer, data)
            self._hear(peer)
            took = max(1e-9, time.perf_counter() - started - 2 * latency_s)
            if took >= _LONG_S or size >= _MOST_BYTES:
                self._tell(peer, 0)
                return size / took
            size *= _GROWS

    def _take(self, peer: int) -> None:
        """Take whatever the peer sends in its `_rate`."""
        while size := self._hear(peer):
            self._receive(peer, torch.empty(size, dtype=torch.uint8, device=self._device))
            self._tell(peer, 0)

    def _tell(self, peer: int, number: int) -> None:
        self._send(peer, self._word.fill_(number))

    def _hear(self, peer: int) -> int:
        self._receive(peer, self._word)
        return int(self._word)

    def _send(self, peer: int, tensor: torch.Tensor) -> None:
        self._wait(self._backend.send([tensor], peer, _TAG), peer, "take")

    def _receive(self, peer: int, tensor: torch.Tensor) -> None:
        self._wait(self._backend.recv([tensor], peer, _TAG), peer, "send")

    def _wait(self, work: Any, peer: int, what: str) -> None:
        since = time.strftime("%H:%M:%S")
        try:
            work.wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise PeerLost(
                f"rank {peer} did not {what} what rank {self._me} measures their link with, since {since}: {error}",
                peer,
            ) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
