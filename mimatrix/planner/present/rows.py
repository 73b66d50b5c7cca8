"""Plans and measurements as rows for tables, and a step as a sequence of activities on every device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from mimatrix.core.units import format_seconds
from mimatrix.planner.model.cost import meets
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Measurements, Profile

Doing = Literal["computing", "waiting", "communication", "optimizer"]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What one device does in a step."""

    device: str
    batch: int
    micro_steps: str
    share: float
    """Of the states that it owns; all of them if nothing is cut."""
    busy_s: float
    idle_s: float
    memory_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What was measured of one rank."""

    rank: int
    device: str
    largest_batch: int
    samples_per_s: float
    """With the largest batch."""
    noise: float
    optimizer_s: float
    room_bytes: int
    took_s: float
    overflows: int


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One batch size on one rank."""

    rank: int
    batch: int
    seconds: float
    samples_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class ActivitySpan:
    """What a device does in an interval."""

    doing: Doing
    began_s: float
    ended_s: float


def plan_rows(plan: Plan) -> list[PlanRow]:
    """Return a row for each device that takes part."""
    shares = plan.shares.fractions if plan.stage else (1.0,) * len(plan.parts)
    return [
        PlanRow(
            part.name,
            sum(sizes),
            format_micro_steps(sizes),
            share,
            part.busy_s,
            part.idle_s,
            part.memory_bytes,
            part.room_bytes,
        )
        for part, sizes, share in zip(plan.parts, plan.split.micro, shares, strict=True)
    ]


def format_micro_steps(sizes: Sequence[int]) -> str:
    """Return micro-batches as `4 x 32` or `2 x 32 + 31`; `-` for a device without samples."""
    runs = [(size, len(list(alike))) for size, alike in groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs) or "-"


def profile_rows(measurements: Measurements) -> list[ProfileRow]:
    """Return a row for each rank."""
    return [
        ProfileRow(
            rank,
            each.device,
            each.seconds.most,
            samples_per_s(each, each.seconds.most),
            each.noise,
            each.optimizer_s,
            each.room_bytes,
            each.took_s,
            each.overflows,
        )
        for rank, each in enumerate(measurements.profiles)
    ]


def size_rows(measurements: Measurements) -> list[SizeRow]:
    """Return a row for each rank and batch size that was timed."""
    return [
        SizeRow(rank, size, seconds, size / seconds if seconds else 0.0, each.memory.at(min(size, each.memory.most)))
        for rank, each in enumerate(measurements.profiles)
        for size, seconds in each.seconds.points
    ]


def samples_per_s(profile: Profile, batch: int) -> float:
    """Return the throughput of a device with micro-batches of this size."""
    seconds = profile.seconds.at(batch)
    return batch / seconds if seconds else 0.0


def format_rate_per_s(per_s: float) -> str:
    """Return a rate with three digits, or with all digits before the point."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def trace_step(plan: Plan, profiles: Sequence[Profile], equal_counts: bool = False) -> list[list[ActivitySpan]]:
    """Return what each device of a plan does in a step, and when; `profiles` are of its parts.

    If devices meet in every micro-step, they wait in each. Otherwise a step in stage 0 begins with the optimizer of the
    one before: a device continues as soon as it has the sum.
    """
    micro = [_micro_seconds(plan, rank, profile) for rank, profile in enumerate(profiles)]
    stepping = [max(0.0, part.busy_s - sum(each)) for part, each in zip(plan.parts, micro, strict=True)]
    in_lockstep = meets(plan.stage, equal_counts)
    rounds = plan.split.rounds if in_lockstep else 1
    trace = _StepTrace(len(profiles))
    ahead = plan.stage == 0 and not in_lockstep
    if ahead:
        trace.add("optimizer", [[each] for each in stepping])
    for number in range(rounds):
        trace.add("computing", [each[number : number + 1] if in_lockstep else each for each in micro])
        if in_lockstep:
            trace.communicate(plan.communication_s / rounds)
    if not in_lockstep:
        trace.communicate(plan.communication_s)
    if not ahead:
        trace.add("optimizer", [[each] for each in stepping])
    trace.communicate(0.0)
    return trace.spans


class _StepTrace:
    """Collects the activities of every device."""

    def __init__(self, ranks: int) -> None:
        self.spans: list[list[ActivitySpan]] = [[] for _ in range(ranks)]
        self._at_s = [0.0] * ranks

    def add(self, doing: Doing, seconds: Sequence[Sequence[float]]) -> None:
        """Add activities of each device by itself, one after the other."""
        for rank, own in enumerate(seconds):
            for each in own:
                self._add(rank, doing, self._at_s[rank] + each)

    def communicate(self, seconds: float) -> None:
        """Add communication of all devices, which starts when the last one is ready."""
        met_s = max(self._at_s)
        for rank in range(len(self.spans)):
            self._add(rank, "waiting", met_s)
            self._add(rank, "communication", met_s + seconds)

    def _add(self, rank: int, doing: Doing, ended_s: float) -> None:
        if ended_s > self._at_s[rank]:
            self.spans[rank].append(ActivitySpan(doing, self._at_s[rank], ended_s))
            self._at_s[rank] = ended_s


def summarize_step(plan: Plan) -> str:
    """Return the time, throughput and idle part of a step in one line."""
    known = plan.communication_known
    moving = f"{format_seconds(plan.communication_s)} of it communication" if known else "without communication"
    rate = f"{format_rate_per_s(plan.samples_per_s)} samples/s{'' if known else ' at most'}"
    return f"step {format_seconds(plan.step_s)} ({moving}), {rate}, {plan.idle:.1%} idle"


def compare_plans(before: Plan, after: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table of two plans: (what, before, after)."""
    yield "devices", str(len(before.parts)), str(len(after.parts))
    yield "stage", str(before.stage), str(after.stage)
    yield "step", format_seconds(before.step_s), format_seconds(after.step_s)
    yield "communication", _communication(before), _communication(after)
    gain = f"{'' if after.communication_known else 'up to '}{after.samples_per_s / before.samples_per_s:.2f}x"
    yield "samples/s", format_rate_per_s(before.samples_per_s), f"{format_rate_per_s(after.samples_per_s)} ({gain})"
    yield "idle", f"{before.idle:.1%}", f"{after.idle:.1%}"
    yield "left out", _left_out(before), _left_out(after)


def _communication(plan: Plan) -> str:
    return format_seconds(plan.communication_s) if plan.communication_known else "unknown"


def _left_out(plan: Plan) -> str:
    return ", ".join(each.name for each in plan.left_out) or "-"


def _micro_seconds(plan: Plan, rank: int, profile: Profile) -> list[float]:
    return [profile.seconds.at(size) + profile.handling_s[plan.stage] for size in plan.split.micro[rank]]
