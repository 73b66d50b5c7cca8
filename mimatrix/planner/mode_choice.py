"""Which mode suits a cluster: all ranks together, or groups that do not wait for each other. Both are priced.

Together, a step takes what its plan says. Apart, each of G groups does a global batch in what its own plan says, and
moves its push: over the links to the shards, on from there to their mirrors, and all parameters back, with the steps
of the optimizer that are made of it (over a G-th of the elements, at the shard and at the mirror at once).

    cycle    max(computing, moving) where a group computes on while its push is under way, else their sum; longer where
             its processor serves the pushes of all groups, too, or where they are more than a link carries
    late     t, the pushes of others from pull to push, which are two cycles where a group computes on, else one, less
             half of the moving; and the group's own one that is under way
    worth    a sample of a push that is t late counts for (1 + t) ** -LATE of a sample of all together

Or groups make LOCAL_STEPS steps by themselves, and then push how far they came (the policy `local`): a cycle has so
many global batches and one push. The mean of G groups that each went so far is about as good as one of them, so a
sample counts for 1 / G.

The worth is ours, found by measuring (docs/hybrid.md): Kim et al. publish no formulas.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mimatrix.cluster import Cluster, Ecmp, Fabric
from mimatrix.cluster.routes import find_paths
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_rate
from mimatrix.planner.memory_fit import bytes_shown
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import Problem
from mimatrix.planner.planner import make_plan
from mimatrix.planner.present.rows import rate_text
from mimatrix.planner.reasons import seconds_shown

Floats = NDArray[np.float64]
Flow = tuple[int, int, float]
"""From the host of a group to that of another, so many bytes."""

LATE = 0.7
"""By how much samples of late pushes count less: an exponent."""
LOCAL_STEPS = 10
"""That groups make by themselves, where that is worth more."""
MESSAGE_S = 0.9e-3
"""Of a processor, for one message of a push, with whoever sends it and with whoever serves it (seen in the lab)."""
_WHOLE = 0.9
"""Who has less of a processor than this shares what it has with its service; others are taken to have room for it."""
_CARRIED = 0.7
"""Of a link's rate, what pushes use at the most (seen once, with four hosts): each waits for answers in between."""
_GAIN = 1.05
"""Apart must be worth so many times as much: together is exact."""
_HALVINGS = 50


def worth(staleness: float) -> float:
    """What a sample of a push counts that is so late, by one of all together."""
    return float((1 + staleness) ** -LATE)


@dataclass(frozen=True, slots=True)
class Pushing:
    """What one group would do."""

    ranks: tuple[int, ...]
    plan: Plan
    """Of a global batch on its ranks alone."""
    moving_s: float
    """What its push takes on the way, if no other group pushes."""
    cycle_s: float
    """From push to push."""
    staleness: float
    steps: int = 1
    """Of its own in a cycle."""

    @property
    def samples_per_s(self) -> float:
        """Of this group."""
        return self.steps * self.plan.global_batch / self.cycle_s

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        return {name: getattr(self, name) for name in self.__slots__} | {"plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Pushing":
        """What `to_json` gave."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"]), "plan": Plan.from_json(fields["plan"])})


@dataclass(frozen=True, slots=True)
class Apart:
    """All groups, each at its own pace."""

    groups: tuple[Pushing, ...]
    overlaps: bool
    """Whether they compute on while a push is under way."""
    slowest_bytes_per_s: float
    """Of the links between them."""
    local_steps: int = 0
    """That they make by themselves before they push how far they came; 0: they push gradients."""

    @property
    def samples_per_s(self) -> float:
        """Of all groups."""
        return sum(group.samples_per_s for group in self.groups)

    @property
    def staleness(self) -> float:
        """Of a usual push."""
        per_s = [1 / group.cycle_s for group in self.groups]
        late = (each * group.staleness for each, group in zip(per_s, self.groups, strict=True))
        return sum(late) / sum(per_s)

    @property
    def worth_per_s(self) -> float:
        """Samples of all together that would bring as much."""
        if self.local_steps:
            return self.samples_per_s / len(self.groups)
        return sum(group.samples_per_s * worth(group.staleness) for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        groups = [group.to_json() for group in self.groups]
        return {name: getattr(self, name) for name in self.__slots__} | {"groups": groups}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Apart":
        """What `to_json` gave."""
        return cls(**{**fields, "groups": tuple(map(Pushing.from_json, fields["groups"]))})


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode to take, and what it was chosen from."""

    mode: Literal["sync", "hybrid"]
    reason: str
    together: Plan
    apart: Apart | None
    """Not there where groups are not possible."""

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        apart = self.apart.to_json() if self.apart else None
        return {"mode": self.mode, "reason": self.reason, "together": self.together.to_json(), "apart": apart}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Choice":
        """What `to_json` gave."""
        apart = fields["apart"]
        return cls(
            fields["mode"],
            fields["reason"],
            Plan.from_json(fields["together"]),
            Apart.from_json(apart) if apart else None,
        )


def choose_mode(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    cluster: Cluster,
    against: str = "",
    processors: Sequence[float] = (),
) -> Choice:
    """The mode that brings more. Rank i of the problem is device i of `cluster`.

    `against`: why there cannot be groups, where that is known already. `processors`: how much of one each rank has.
    """
    together = make_plan(problem)
    if len(groups) < 2:
        return Choice("sync", "sync: there is one group, and nobody to wait for", together, None)
    try:
        apart = None if against else price_apart(problem, groups, cluster, processors)
    except UserError as error:
        apart, against = None, str(error)
    if apart is None:
        return Choice("sync", f"sync: groups cannot train apart: {against}", together, None)
    if apart.worth_per_s > _GAIN * together.samples_per_s:
        return Choice("hybrid", _why_apart(problem, together, apart), together, apart)
    return Choice("sync", _why_together(problem, together, apart), together, apart)


def price_apart(
    problem: Problem, groups: Sequence[Sequence[int]], cluster: Cluster, processors: Sequence[float] = ()
) -> Apart:
    """What groups bring in the way that is worth most: computing on while they push or not, or with steps of their own.

    A sentence if one lacks room.
    """
    plans = [make_plan(_alone(problem, group)) for group in groups]
    firsts = [group[0] for group in groups]
    ways = _Ways(
        cluster, firsts, problem.model.gradient_bytes, [processors[rank] if processors else 1.0 for rank in firsts]
    )
    stepping = [problem.profiles[group[0]].optimizer_s for group in groups]
    moving = [ways.moving_s(group, stepping) for group in range(len(groups))]
    found = [_apart(groups, plans, moving, ways, overlaps) for overlaps in (True, False)]
    found.append(_apart(groups, plans, moving, ways, overlaps=False, local_steps=LOCAL_STEPS))
    return max(found, key=lambda each: each.worth_per_s)


def _alone(problem: Problem, group: Sequence[int]) -> Problem:
    """The same with the ranks of a group alone."""
    return replace(
        problem,
        profiles=tuple(problem.profiles[rank] for rank in group),
        names=tuple(problem.names[rank] for rank in group),
        network=lambda members: problem.network(tuple(group[member] for member in members)),
        stages=problem.stages if len(group) > 1 else (0,),
    )


def _apart(
    groups: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    moving: Sequence[float],
    ways: "_Ways",
    overlaps: bool,
    local_steps: int = 0,
) -> Apart:
    steps = max(1, local_steps)
    both = zip((steps * plan.step_s for plan in plans), moving, strict=True)
    free = [max(each) if overlaps else sum(each) for each in both]
    cycles = [1 / each for each in ways.pushes_per_s(ways.served_per_s(free))]
    found = []
    for number, (plan, cycle) in enumerate(zip(plans, cycles, strict=True)):
        span = (2 if overlaps else 1) * cycle - moving[number] / 2
        late = float(overlaps) + sum(span / other for each, other in enumerate(cycles) if each != number)
        found.append(Pushing(tuple(groups[number]), plan, moving[number], cycle, late, steps))
    return Apart(tuple(found), overlaps, ways.slowest_bytes_per_s, local_steps)


class _Ways:
    """The channels between the hosts of groups: a group pushes from where its first rank is, and its shard lies there.

    Parameters of `size` bytes are cut over the groups; each part has its mirror with the next group.
    """

    def __init__(self, cluster: Cluster, firsts: Sequence[int], size: int, processors: Sequence[float]) -> None:
        fabric = Fabric(cluster)
        self._processors = np.array(processors)
        self._groups, self._part = len(firsts), size / len(firsts)
        self._rates, self._latencies = fabric.rates, fabric.latencies
        pairs = [(a, b) for a in range(len(firsts)) for b in range(len(firsts)) if a != b]
        ends = np.array([[firsts[a], firsts[b]] for a, b in pairs])
        rows = find_paths(fabric, ends[:, 0], ends[:, 1], Ecmp())
        self._paths = {pair: row[row >= 0] for pair, row in zip(pairs, rows, strict=True)}

    def moving_s(self, group: int, stepping_s: Sequence[float]) -> float:
        """A push of a group, while no other is under way; `stepping_s`: over all elements, on each host."""
        said = self._groups / self._processors[group] + 2 / self._processors.min()
        stepped = max(stepping_s) / self._groups
        return float(said) * MESSAGE_S + stepped + sum(self._seconds(flows) for flows in self._phases(group))

    def served_per_s(self, cycles_s: Sequence[float]) -> list[float]:
        """Pushes of each group, where hosts serve two messages of every push beside their own cycle."""
        free = np.array(cycles_s)
        serving = np.where(self._processors < _WHOLE, 2 * MESSAGE_S / self._processors, 0.0)
        least, most = 0.0, float((1 / free).sum())
        for _ in range(_HALVINGS):
            every = (least + most) / 2
            made = np.maximum(0.0, 1 - serving * every) / free
            least, most = (every, most) if made.sum() > every else (least, every)
        return [max(float(each), 1e-9) for each in np.maximum(0.0, 1 - serving * most) / free]

    def pushes_per_s(self, wanted: Sequence[float]) -> list[float]:
        """Of each group: as many as it wants, up to the one limit at which no channel has more than pushes use."""
        each = np.array([self._loads(flow for flows in self._phases(group) for flow in flows) for group in self._all])
        least, most = 0.0, max(wanted)
        for _ in range(_HALVINGS):
            limit = (least + most) / 2
            carried = np.minimum(wanted, limit) @ each
            least, most = (limit, most) if (carried <= _CARRIED * self._rates).all() else (least, limit)
        return [min(want, most) for want in wanted]

    @property
    def slowest_bytes_per_s(self) -> float:
        """Of all channels that pushes cross."""
        return min((float(self._rates[path].min()) for path in self._paths.values() if len(path)), default=inf)

    @property
    def _all(self) -> range:
        return range(self._groups)

    def _next(self, group: int) -> int:
        return (group + 1) % self._groups

    def _phases(self, group: int) -> tuple[list[Flow], list[Flow], list[Flow]]:
        """One after the other: to the shards (its own is mirrored at once), to the mirrors of the others, and back."""
        others = [other for other in self._all if other != group]
        there: list[Flow] = [(group, other, self._part) for other in others]
        return (
            [*there, (group, self._next(group), self._part)],
            [(other, self._next(other), self._part) for other in others],
            [(other, group, self._part) for other in others],
        )

    def _loads(self, flows: Iterable[Flow]) -> Floats:
        """Bytes on each channel."""
        found = np.zeros(len(self._rates))
        for source, target, size in flows:
            found[self._paths[source, target]] += size
        return found

    def _seconds(self, flows: Sequence[Flow]) -> float:
        furthest = max(float(self._latencies[self._paths[source, target]].sum()) for source, target, _ in flows)
        return 2 * furthest + float((self._loads(flows) / self._rates).max())


def _why_apart(problem: Problem, together: Plan, apart: Apart) -> str:
    size, rate = bytes_shown(problem.model.gradient_bytes), format_rate(apart.slowest_bytes_per_s)
    moved_s = problem.model.gradient_bytes / apart.slowest_bytes_per_s
    # The network is to blame only where it takes the time.
    what = f"moving {size} at {rate}" if 2 * moved_s > together.communication_s else f"meeting to exchange {size}"
    return (
        f"hybrid: all together would make {rate_text(together.samples_per_s)} samples/s, since {what} "
        f"takes {seconds_shown(together.communication_s)} of each {seconds_shown(together.step_s)} step; "
        f"{_groups_make(apart)}"
    )


def _why_together(problem: Problem, together: Plan, apart: Apart) -> str:
    longest = max(group.moving_s for group in apart.groups)
    return (
        f"sync: all together make {rate_text(together.samples_per_s)} samples/s, "
        f"{together.communication_s / together.step_s:.0%} of the time moving data; {_groups_make(apart)} "
        f"(a push of {bytes_shown(problem.model.gradient_bytes)} takes {seconds_shown(longest)})"
    )


def _groups_make(apart: Apart) -> str:
    how = f"{apart.local_steps} steps before each push" if apart.local_steps else f"pushes {apart.staleness:.1f} late"
    rate, counted = rate_text(apart.samples_per_s), rate_text(apart.worth_per_s)
    return f"in {len(apart.groups)} groups {rate}, worth {counted} with {how}"
