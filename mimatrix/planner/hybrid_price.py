"""Price hybrid mode: how many samples groups make that do not wait for each other, and what those are worth.

Each of G groups computes a global batch in the time of its own plan, and moves its push: over the links to the shards,
on to their mirrors, and all parameters back, with the optimizer steps that are made of it (over a G-th of the elements,
at the shard and at the mirror at once).

    cycle    max(computing, pushing) if a group computes while its push is in flight, else their sum; longer if its CPU
             also serves the pushes of all groups, or if they are more than a link carries
    late     t, the pushes of others from pull to push: two cycles if a group computes on, else one, less half of the
             push; and the group's own one that is in flight
    worth    a sample of a push that is t late counts for (1 + t) ** -STALENESS_EXPONENT of a sample in sync mode

Or groups make LOCAL_STEPS steps by themselves, and then push how far they came (the policy `local`): a cycle has that
many global batches and one push. The mean of G groups that each went that far is about as good as one of them, so a
sample counts for 1 / G.

The worth is our own, found by measuring (docs/hybrid.md): Kim et al. publish no formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mimatrix.cluster import Cluster
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import CommunicationModel, Problem
from mimatrix.planner.model.profile import Communication
from mimatrix.planner.planner import make_plan
from mimatrix.planner.push_network import PushNetwork

STALENESS_EXPONENT = 0.7
"""How much less the samples of a late push count."""
LOCAL_STEPS = 10
"""Steps that groups make by themselves, if that is worth more."""


def sample_worth(staleness: float) -> float:
    """Return what a sample of a push that is this late counts, relative to a sample in sync mode."""
    return float((1 + staleness) ** -STALENESS_EXPONENT)


@dataclass(frozen=True, slots=True)
class GroupPrice:
    """What one group would do in hybrid mode."""

    ranks: tuple[int, ...]
    plan: Plan
    """Of a global batch on its ranks alone."""
    push_s: float
    """The time of its push if no other group pushes."""
    cycle_s: float
    """From push to push."""
    staleness: float
    steps: int = 1
    """Its own steps in a cycle."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of this group."""
        return self.steps * self.plan.global_batch / self.cycle_s

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return {name: getattr(self, name) for name in self.__slots__} | {"plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "GroupPrice":
        """Return what `to_json` was called on."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"]), "plan": Plan.from_json(fields["plan"])})


@dataclass(frozen=True, slots=True)
class HybridPrice:
    """What all groups would do, each at its own pace."""

    groups: tuple[GroupPrice, ...]
    overlaps: bool
    """Whether groups compute while a push is in flight."""
    slowest_bytes_per_s: float
    """Of the links between them."""
    local_steps: int = 0
    """Steps that groups make by themselves before they push how far they came; 0: they push gradients."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all groups."""
        return sum(group.samples_per_s for group in self.groups)

    @property
    def staleness(self) -> float:
        """The staleness of an average push."""
        per_s = [1 / group.cycle_s for group in self.groups]
        late = (rate * group.staleness for rate, group in zip(per_s, self.groups, strict=True))
        return sum(late) / sum(per_s)

    @property
    def worth_per_s(self) -> float:
        """Samples per second in sync mode that would bring as much."""
        if self.local_steps:
            return self.samples_per_s / len(self.groups)
        return sum(group.samples_per_s * sample_worth(group.staleness) for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        groups = [group.to_json() for group in self.groups]
        return {name: getattr(self, name) for name in self.__slots__} | {"groups": groups}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "HybridPrice":
        """Return what `to_json` was called on."""
        return cls(**{**fields, "groups": tuple(map(GroupPrice.from_json, fields["groups"]))})


def price_hybrid(
    problem: Problem, groups: Sequence[Sequence[int]], cluster: Cluster, cpus: Sequence[float] = ()
) -> HybridPrice:
    """Return what groups bring in the way that is worth most: overlapping their pushes or not, or with local steps.

    Args:
        problem: The problem of all ranks; rank i is device i of `cluster`.
        groups: The ranks of each group.
        cluster: The links between groups.
        cpus: How much of a CPU each rank has; a whole one if omitted.

    Raises:
        UserError: A group lacks memory.
    """
    plans = [make_plan(_problem_of_group(problem, group)) for group in groups]
    firsts = [group[0] for group in groups]
    first_cpus = [cpus[rank] if cpus else 1.0 for rank in firsts]
    network = PushNetwork(cluster, firsts, problem.model.gradient_bytes, first_cpus)
    optimizer_s = [problem.profiles[group[0]].optimizer_s for group in groups]
    pushes_s = [network.push_s(group, optimizer_s) for group in range(len(groups))]
    prices = [_price(groups, plans, pushes_s, network, overlaps) for overlaps in (True, False)]
    prices.append(_price(groups, plans, pushes_s, network, overlaps=False, local_steps=LOCAL_STEPS))
    return max(prices, key=lambda price: price.worth_per_s)


@dataclass(frozen=True, slots=True)
class _GroupCommunication:
    """The communication of the ranks of one group, numbered from 0."""

    model: CommunicationModel
    group: tuple[int, ...]

    def cost(self, members: tuple[int, ...]) -> Communication:
        return self.model.cost(tuple(self.group[member] for member in members))


def _problem_of_group(problem: Problem, group: Sequence[int]) -> Problem:
    """Return the problem of the ranks of a group alone."""
    return replace(
        problem,
        profiles=tuple(problem.profiles[rank] for rank in group),
        names=tuple(problem.names[rank] for rank in group),
        communication=_GroupCommunication(problem.communication, tuple(group)),
        stages=problem.stages if len(group) > 1 else (0,),
    )


def _price(
    groups: Sequence[Sequence[int]],
    plans: Sequence[Plan],
    pushes_s: Sequence[float],
    network: PushNetwork,
    overlaps: bool,
    local_steps: int = 0,
) -> HybridPrice:
    steps = max(1, local_steps)
    times = zip((steps * plan.step_s for plan in plans), pushes_s, strict=True)
    unlimited_s = [max(both) if overlaps else sum(both) for both in times]
    cycles = [1 / rate for rate in network.link_limited_rates(network.cpu_limited_rates(unlimited_s))]
    prices = []
    for number, (plan, cycle) in enumerate(zip(plans, cycles, strict=True)):
        span = (2 if overlaps else 1) * cycle - pushes_s[number] / 2
        late = float(overlaps) + sum(span / other for each, other in enumerate(cycles) if each != number)
        prices.append(GroupPrice(tuple(groups[number]), plan, pushes_s[number], cycle, late, steps))
    return HybridPrice(tuple(prices), overlaps, network.slowest_bytes_per_s, local_steps)
