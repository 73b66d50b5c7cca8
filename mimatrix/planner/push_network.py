"""How often groups can push to each other's parameter shards over a cluster's links, and how long a push takes."""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from mimatrix.cluster import Cluster, Ecmp, Fabric
from mimatrix.cluster.routes import find_paths

Floats = NDArray[np.float64]
Flow = tuple[int, int, float]
"""The sending group, the receiving group, and bytes."""

MESSAGE_S = 0.9e-3
"""CPU time of one message of a push, at the sender and at the server each (measured in the lab)."""
_WHOLE_CPU = 0.9
"""A rank with less of a CPU than this shares it with its service; others are assumed to have room for it."""
_LINK_USE = 0.7
"""The part of a link's rate that pushes use at the most, since each waits for answers (measured with four hosts)."""
_HALVINGS = 50


class PushNetwork:
    """The links between groups. A group pushes from the host of its first rank, and its shard lies there.

    Parameters of `size` bytes are cut over the groups; each shard has its mirror with the next group.
    """

    def __init__(self, cluster: Cluster, firsts: Sequence[int], size: int, cpus: Sequence[float]) -> None:
        """Find the paths between the first ranks of the groups; `cpus` is how much of a CPU each of them has."""
        fabric = Fabric(cluster)
        self._cpus = np.array(cpus)
        self._groups, self._shard_bytes = len(firsts), size / len(firsts)
        self._rates, self._latencies = fabric.rates, fabric.latencies
        pairs = [(a, b) for a in range(len(firsts)) for b in range(len(firsts)) if a != b]
        ends = np.array([[firsts[a], firsts[b]] for a, b in pairs])
        rows = find_paths(fabric, ends[:, 0], ends[:, 1], Ecmp())
        self._paths = {pair: row[row >= 0] for pair, row in zip(pairs, rows, strict=True)}

    def push_s(self, group: int, optimizer_s: Sequence[float]) -> float:
        """Return the seconds of a push if no other is in flight; `optimizer_s` is of all elements, on each host."""
        messages = self._groups / self._cpus[group] + 2 / self._cpus.min()
        stepping_s = max(optimizer_s) / self._groups
        return float(messages) * MESSAGE_S + stepping_s + sum(self._seconds(flows) for flows in self._phases(group))

    def cpu_limited_rates(self, cycles_s: Sequence[float]) -> list[float]:
        """Return pushes per second of each group if its host also serves two messages of every push."""
        own_s = np.array(cycles_s)
        serving_s = np.where(self._cpus < _WHOLE_CPU, 2 * MESSAGE_S / self._cpus, 0.0)
        least, most = 0.0, float((1 / own_s).sum())
        for _ in range(_HALVINGS):
            total = (least + most) / 2
            rates = np.maximum(0.0, 1 - serving_s * total) / own_s
            least, most = (total, most) if rates.sum() > total else (least, total)
        return [max(float(rate), 1e-9) for rate in np.maximum(0.0, 1 - serving_s * most) / own_s]

    def link_limited_rates(self, wanted: Sequence[float]) -> list[float]:
        """Return pushes per second of each group: as wanted, up to the common limit at which no link has too many."""
        loads = np.array([self._loads(flow for flows in self._phases(group) for flow in flows) for group in self._all])
        least, most = 0.0, max(wanted)
        for _ in range(_HALVINGS):
            limit = (least + most) / 2
            carried = np.minimum(wanted, limit) @ loads
            least, most = (limit, most) if (carried <= _LINK_USE * self._rates).all() else (least, limit)
        return [min(want, most) for want in wanted]

    @property
    def slowest_bytes_per_s(self) -> float:
        """The rate of the slowest link that pushes cross."""
        return min((float(self._rates[path].min()) for path in self._paths.values() if len(path)), default=inf)

    @property
    def _all(self) -> range:
        return range(self._groups)

    def _next(self, group: int) -> int:
        return (group + 1) % self._groups

    def _phases(self, group: int) -> tuple[list[Flow], list[Flow], list[Flow]]:
        """Return the flows of a push: to the shards (its own is mirrored at once), to the others' mirrors, and back."""
        size = self._shard_bytes
        others = [other for other in self._all if other != group]
        to_shards: list[Flow] = [(group, other, size) for other in others]
        return (
            [*to_shards, (group, self._next(group), size)],
            [(other, self._next(other), size) for other in others],
            [(other, group, size) for other in others],
        )

    def _loads(self, flows: Iterable[Flow]) -> Floats:
        """Return the bytes on each link."""
        loads = np.zeros(len(self._rates))
        for source, target, size in flows:
            loads[self._paths[source, target]] += size
        return loads

    def _seconds(self, flows: Sequence[Flow]) -> float:
        furthest_s = max(float(self._latencies[self._paths[source, target]].sum()) for source, target, _ in flows)
        return 2 * furthest_s + float((self._loads(flows) / self._rates).max())
