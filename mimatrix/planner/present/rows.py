"""Plans and measurements as rows for tables, and a step as it passes on every device."""

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
    """Of the states that it owns; everything where nothing is cut."""
    busy_s: float
    idle_s: float
    memory_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What one rank was found to be."""

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
class Span:
    """What a device does for a while."""

    doing: Doing
    began_s: float
    ended_s: float


def plan_rows(plan: Plan) -> list[PlanRow]:
    """One for each device that takes part."""
    shares = plan.shares.fractions if plan.stage else (1.0,) * len(plan.parts)
    return [
        PlanRow(
            part.name,
            sum(sizes),
            steps_text(sizes),
            share,
            part.busy_s,
            part.idle_s,
            part.memory_bytes,
            part.room_bytes,
        )
        for part, sizes, share in zip(plan.parts, plan.split.micro, shares, strict=True)
    ]


def steps_text(sizes: Sequence[int]) -> str:
    """`4 x 32`, `2 x 32 + 31`; `-` for a device without samples."""
    runs = [(size, len(list(alike))) for size, alike in groupby(sizes)]
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs) or "-"


def profile_rows(found: Measurements) -> list[ProfileRow]:
    """One for each rank."""
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
        for rank, each in enumerate(found.profiles)
    ]


def size_rows(found: Measurements) -> list[SizeRow]:
    """One for each rank and batch size that was timed."""
    return [
        SizeRow(rank, size, seconds, size / seconds if seconds else 0.0, each.memory.at(min(size, each.memory.most)))
        for rank, each in enumerate(found.profiles)
        for size, seconds in each.seconds.points
    ]


def samples_per_s(profile: Profile, batch: int) -> float:
    """How fast a device is with micro-batches of that size."""
    seconds = profile.seconds.at(batch)
    return batch / seconds if seconds else 0.0


def rate_text(per_s: float) -> str:
    """Three digits, or all before the point."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def lanes(plan: Plan, profiles: Sequence[Profile], equal_counts: bool = False) -> list[list[Span]]:
    """A step on each device of a plan, `profiles` being theirs: what it does when, until all have what they need.

    Where devices meet in every micro-step, they wait in each. In stage 0 without that, a step begins with the
    optimizer's part of the one before: a device goes on as soon as it has the sum.
    """
    micro = [_micro_seconds(plan, rank, profile) for rank, profile in enumerate(profiles)]
    stepping = [max(0.0, part.busy_s - sum(each)) for part, each in zip(plan.parts, micro, strict=True)]
    together = meets(plan.stage, equal_counts)
    rounds = plan.split.rounds if together else 1
    found = _Lanes(len(profiles))
    ahead = plan.stage == 0 and not together
    if ahead:
        found.do("optimizer", [[each] for each in stepping])
    for number in range(rounds):
        found.do("computing", [each[number : number + 1] if together else each for each in micro])
        if together:
            found.move(plan.communication_s / rounds)
    if not together:
        found.move(plan.communication_s)
    if not ahead:
        found.do("optimizer", [[each] for each in stepping])
    found.move(0.0)
    return found.spans


class _Lanes:
    """The spans of every device, as they come about."""

    def __init__(self, ranks: int) -> None:
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self._at_s = [0.0] * ranks

    def do(self, doing: Doing, seconds: Sequence[Sequence[float]]) -> None:
        """Each device on its own, one thing after the other."""
        for rank, own in enumerate(seconds):
            for each in own:
                self._add(rank, doing, self._at_s[rank] + each)

    def move(self, seconds: float) -> None:
        """All together, when the last is there."""
        met_s = max(self._at_s)
        for rank in range(len(self.spans)):
            self._add(rank, "waiting", met_s)
            self._add(rank, "communication", met_s + seconds)

    def _add(self, rank: int, doing: Doing, ended_s: float) -> None:
        if ended_s > self._at_s[rank]:
            self.spans[rank].append(Span(doing, self._at_s[rank], ended_s))
            self._at_s[rank] = ended_s


def step_text(plan: Plan) -> str:
    """What a step takes and brings, in one line."""
    known = plan.communication_known
    moving = f"{format_seconds(plan.communication_s)} of it communication" if known else "without communication"
    rate = f"{rate_text(plan.samples_per_s)} samples/s{'' if known else ' at the most'}"
    return f"step {format_seconds(plan.step_s)} ({moving}), {rate}, {plan.idle:.1%} idle"


def compared(now: Plan, then: Plan) -> Iterator[tuple[str, str, str]]:
    """Two plans side by side: (what, now, then)."""
    yield "devices", str(len(now.parts)), str(len(then.parts))
    yield "stage", str(now.stage), str(then.stage)
    yield "step", format_seconds(now.step_s), format_seconds(then.step_s)
    yield "communication", _communication(now), _communication(then)
    gain = f"{'' if then.communication_known else 'up to '}{then.samples_per_s / now.samples_per_s:.2f}x"
    yield "samples/s", rate_text(now.samples_per_s), f"{rate_text(then.samples_per_s)} ({gain})"
    yield "idle", f"{now.idle:.1%}", f"{then.idle:.1%}"
    yield "left out", _left_out(now), _left_out(then)


def _communication(plan: Plan) -> str:
    return format_seconds(plan.communication_s) if plan.communication_known else "unknown"


def _left_out(plan: Plan) -> str:
    return ", ".join(each.name for each in plan.left_out) or "-"


def _micro_seconds(plan: Plan, rank: int, profile: Profile) -> list[float]:
    return [profile.seconds.at(size) + profile.handling_s[plan.stage] for size in plan.split.micro[rank]]
