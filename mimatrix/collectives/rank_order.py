"""Orders and groups of ranks that follow the cluster: near ranks side by side, each node and rack entered once."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from math import isqrt

import numpy as np

from mimatrix.cluster.fabric import Fabric, Floats, Ints
from mimatrix.collectives.halving_doubling import largest_power_of_two

_MOST_UNCROSSED = 512


def ring_order(fabric: Fabric, placement: Sequence[int]) -> tuple[int, ...]:
    """Walk over all ranks, always to the nearest one left; among equally near ones, to the one with the fastest NIC.

    Since ranks of a node are nearer than those of a rack, and those nearer than others, each node and rack is left only
    when all of it was visited. The walk starts at the fastest NIC; then detours are removed from the closed circle.
    """
    devices = np.asarray(placement)
    rates = nic_rates(fabric, placement)
    hops = _RankHops(fabric, devices)
    left = np.lexsort((np.arange(len(devices)), -rates))
    order: list[int] = []
    nearest = 0
    while len(left):
        order.append(int(left[nearest]))
        left = np.delete(left, nearest)
        # `left` stays sorted by rate, so the first of the nearest is the fastest of them.
        nearest = int(np.argmin(hops.between(order[-1], left))) if len(left) else 0
    return tuple(_uncross(order, hops) if len(order) <= _MOST_UNCROSSED else order)


def _uncross(order: list[int], hops: "_RankHops") -> list[int]:
    """Reverse stretches of the circle while that makes it shorter: a greedy walk may end far from its start."""
    circle = np.array(order)
    apart = np.array([hops.between(rank, np.arange(len(order))) for rank in range(len(order))])
    if not np.isfinite(apart).all():
        return order
    improved = True
    while improved:
        improved = False
        for i in range(len(circle) - 1):
            here, onward = circle[i], np.roll(circle, -1)
            saved = apart[here, circle[i + 1]] + apart[circle, onward]
            saved -= apart[here, circle] + apart[circle[i + 1], onward]
            saved[: i + 2] = 0
            j = int(np.argmax(saved))
            if saved[j] > 0:
                circle[i + 1 : j + 1] = circle[i + 1 : j + 1][::-1].copy()
                improved = True
    return [int(rank) for rank in circle]


def natural_groups(fabric: Fabric, placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by node; if every node holds one, by the switch that they are attached to; otherwise by number.

    Groups come in the order of a ring over them: the one with the fastest NIC first, racks one after another.
    """
    order = ring_order(fabric, placement)
    exits = [fabric.exits[device] for device in placement]
    by_node = _group_by(order, lambda rank: int(fabric.node_of[placement[rank]]))
    by_switch = _group_by(order, lambda rank: exits[rank][0].core if exits[rank] else -1)
    for groups in (by_node, by_switch):
        if 1 < len(groups) < len(order):
            return tuple(tuple(sorted(group)) for group in groups)
    return even_groups(len(order))


def even_groups(ranks: int, size: int = 0) -> tuple[tuple[int, ...], ...]:
    """Group ranks in order, `size` in each, the last smaller. The default size is a divisor near the square root."""
    divisors = [count for count in range(2, isqrt(ranks) + 1) if ranks % count == 0]
    size = size or max(divisors, default=largest_power_of_two(max(1, isqrt(ranks))))
    return tuple(tuple(range(first, min(first + size, ranks))) for first in range(0, ranks, size))


def nic_rates(fabric: Fabric, placement: Sequence[int]) -> Floats:
    """Return the bytes per second that each rank can send out of its node; shared NICs are divided among users."""
    users: dict[int, int] = defaultdict(int)
    for device in placement:
        for way in fabric.exits[device]:
            for channel in way.out:
                users[channel] += 1
    rates = np.zeros(len(placement))
    for rank, device in enumerate(placement):
        for way in fabric.exits[device]:
            rates[rank] += min((fabric.rates[channel] / users[channel] for channel in way.out), default=np.inf)
    return rates


class _RankHops:
    """Distances between ranks: -1 within a node, otherwise the hops between the nearest switches of both."""

    def __init__(self, fabric: Fabric, devices: Ints) -> None:
        self._distance, self._node = fabric.distance, fabric.node_of[devices]
        most = max(len(fabric.exits[device]) for device in devices)
        rows = [[way.core for way in fabric.exits[device]] for device in devices]
        self._cores = np.array([row + [-1] * (most - len(row)) for row in rows], dtype=np.int64)

    def between(self, rank: int, others: Ints) -> Floats:
        """Return the distances from one rank to each of the others; infinite if no path joins them."""
        hops = np.where(self._node[others] == self._node[rank], -1.0, np.inf)
        for a, b in product(self._cores[rank], self._cores[others].T):
            if a >= 0:
                hops = np.minimum(hops, np.where(b >= 0, self._distance[a, b], np.inf))
        return hops


def _group_by(order: Sequence[int], key: Callable[[int], int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for rank in order:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())
