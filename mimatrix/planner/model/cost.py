"""The cost model of a step: plans are searched by it, and predictions are made with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mimatrix.collectives.shares import Shares
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step costs each rank."""

    step_s: float
    communication_s: float
    """The part of `step_s` in which data moves and no rank computes."""
    busy_s: tuple[float, ...]
    """Each rank's own computing: its micro-batches and its part of the optimizer's step."""
    memory_bytes: tuple[int, ...]
    """Of each rank, at its peak."""


def meets(stage: int, equal_counts: bool) -> bool:
    """Tell whether ranks meet in every micro-step: gradients are cut, or samples of a micro-step are coupled."""
    return stage >= 2 or equal_counts


def cost_of(
    stage: int,
    split: Split,
    shares: Shares,
    model: ModelSize,
    profiles: Sequence[Profile],
    communication: Communication,
    equal_counts: bool = False,
) -> Cost:
    """Return what a step costs.

    T_i(b) is the time of rank i for a micro-batch of b samples, handling included; T_i(0) is 0. If ranks meet only at
    the end (stages 0 and 1), each works as long as its own micro-batches take, and the step waits for the longest. If
    they meet in every micro-step (stages 2 and 3, and everywhere with
    `equal_counts`) each round takes as long as its slowest rank, and moves data of its own.
    A rank steps the optimizer over its share, and all wait for the longest. In stage 0 it steps everything and
    continues by itself; unless there are rounds to meet in, its own sum of both counts.
    """
    times = [_times(stage, sizes, profile) for sizes, profile in zip(split.micro, profiles, strict=True)]
    owned = shares.fractions if stage else (1.0,) * len(profiles)
    stepping = [part * profile.optimizer_s for part, profile in zip(owned, profiles, strict=True)]
    busy = tuple(sum(each) + step for each, step in zip(times, stepping, strict=True))
    paid = communication.once_s[stage]
    if meets(stage, equal_counts):
        paid += split.rounds * communication.round_s[stage]
        computing = sum(max(each[turn] for each in times if turn < len(each)) for turn in range(split.rounds))
        computing += max(stepping)
    elif stage == 0:
        computing = max(busy)
    else:
        computing = max(sum(each) for each in times) + max(stepping)
    return Cost(computing + paid, paid, busy, _memory(stage, split, shares, model, profiles))


def _times(stage: int, sizes: Sequence[int], profile: Profile) -> list[float]:
    table, handling = profile.seconds.table, profile.handling_s[stage]
    return [float(table[size]) + handling for size in sizes]


def _memory(stage: int, split: Split, shares: Shares, model: ModelSize, profiles: Sequence[Profile]) -> tuple[int, ...]:
    return tuple(
        model.kept_bytes(stage, share) + round(float(profile.memory.table[max(sizes, default=0)]))
        for sizes, share, profile in zip(split.micro, shares.fractions, profiles, strict=True)
    )
