"""Choose the mode that suits a cluster: all ranks in sync, or groups that do not wait for each other. Both are priced.

In sync mode a step takes what its plan says; hybrid_price.py prices groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mimatrix.cluster import Cluster
from mimatrix.core.errors import UserError
from mimatrix.core.text import spell_bytes, spell_seconds
from mimatrix.core.units import format_rate
from mimatrix.planner.hybrid_price import HybridPrice, price_hybrid
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import Problem
from mimatrix.planner.planner import make_plan
from mimatrix.planner.present.rows import format_rate_per_s

_LEAST_GAIN = 1.05
"""Hybrid mode must be worth this many times as much as sync mode, which is exact."""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode to take, and what it was chosen from."""

    mode: Literal["sync", "hybrid"]
    reason: str
    sync: Plan
    hybrid: HybridPrice | None
    """None if groups are not possible."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        hybrid = self.hybrid.to_json() if self.hybrid else None
        return {"mode": self.mode, "reason": self.reason, "sync": self.sync.to_json(), "hybrid": hybrid}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModeChoice":
        """Return what `to_json` was called on."""
        hybrid = fields["hybrid"]
        return cls(
            fields["mode"],
            fields["reason"],
            Plan.from_json(fields["sync"]),
            HybridPrice.from_json(hybrid) if hybrid else None,
        )


def choose_mode(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    cluster: Cluster,
    objection: str = "",
    cpus: Sequence[float] = (),
) -> ModeChoice:
    """Return the mode that brings more, with the prices of both.

    Args:
        problem: The problem of all ranks; rank i is device i of `cluster`.
        groups: The ranks of each group.
        cluster: The links between groups.
        objection: Why there cannot be groups, if that is known already.
        cpus: How much of a CPU each rank has; a whole one if omitted.
    """
    sync = make_plan(problem)
    if len(groups) < 2:
        return ModeChoice("sync", "sync: there is one group, and no other to wait for", sync, None)
    try:
        hybrid = None if objection else price_hybrid(problem, groups, cluster, cpus)
    except UserError as error:
        hybrid, objection = None, str(error)
    if hybrid is None:
        return ModeChoice("sync", f"sync: groups cannot train apart: {objection}", sync, None)
    if hybrid.worth_per_s > _LEAST_GAIN * sync.samples_per_s:
        return ModeChoice("hybrid", _explain_hybrid(problem, sync, hybrid), sync, hybrid)
    return ModeChoice("sync", _explain_sync(problem, sync, hybrid), sync, hybrid)


def _explain_hybrid(problem: Problem, sync: Plan, hybrid: HybridPrice) -> str:
    size, rate = spell_bytes(problem.model.gradient_bytes), format_rate(hybrid.slowest_bytes_per_s)
    moved_s = problem.model.gradient_bytes / hybrid.slowest_bytes_per_s
    # The network is to blame only if it takes the time.
    what = f"moving {size} at {rate}" if 2 * moved_s > sync.communication_s else f"meeting to exchange {size}"
    return (
        f"hybrid: all together would make {format_rate_per_s(sync.samples_per_s)} samples/s, since {what} "
        f"takes {spell_seconds(sync.communication_s)} of each {spell_seconds(sync.step_s)} step; "
        f"{_describe_groups(hybrid)}"
    )


def _explain_sync(problem: Problem, sync: Plan, hybrid: HybridPrice) -> str:
    longest_s = max(group.push_s for group in hybrid.groups)
    return (
        f"sync: all together make {format_rate_per_s(sync.samples_per_s)} samples/s, "
        f"{sync.communication_s / sync.step_s:.0%} of the time moving data; {_describe_groups(hybrid)} "
        f"(a push of {spell_bytes(problem.model.gradient_bytes)} takes {spell_seconds(longest_s)})"
    )


def _describe_groups(hybrid: HybridPrice) -> str:
    how = (
        f"{hybrid.local_steps} steps before each push" if hybrid.local_steps else f"pushes {hybrid.staleness:.1f} late"
    )
    rate, worth = format_rate_per_s(hybrid.samples_per_s), format_rate_per_s(hybrid.worth_per_s)
    return f"in {len(hybrid.groups)} groups {rate}, worth {worth} with {how}"
