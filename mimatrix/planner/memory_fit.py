"""Whether the memory of the ranks suffices for a stage, and if not, which rank lacks how much."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.core.text import join_names, spell_bytes
from mimatrix.planner.model.problem import Problem
from mimatrix.planner.model.profile import STAGES, ModelSize, Profile
from mimatrix.planner.model.split import Split
from mimatrix.planner.search.cost_tables import CostTables, Floats
from mimatrix.planner.search.limits import SHARE_SLACK


class ShortageKind(StrEnum):
    """What there is too little memory for."""

    GIVEN_STATES = "given_states"
    """The states that a rank keeps, with the shares that are given or with everything unsharded."""
    MINIMUM_STATES = "minimum_states"
    """The states that a rank keeps even if its share is empty."""
    SHARED_STATES = "shared_states"
    """The states that are cut over all ranks."""
    ONE_SAMPLE = "one_sample"
    """A micro-batch of one sample next to the states, on the rank with most room for it."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What keeps a stage from fitting."""

    kind: ShortageKind
    lacking_bytes: float
    rank: int | None = None
    """None if all ranks together lack it."""

    def describe(self, names: Sequence[str]) -> str:
        """Return a clause such as `rank 1 (node/1) lacks 4 MB`."""
        size = spell_bytes(self.lacking_bytes)
        if self.rank is None:
            return f"all ranks together lack {size}"
        purpose = {
            ShortageKind.MINIMUM_STATES: " even if it owns nothing",
            ShortageKind.ONE_SAMPLE: " for one sample at a time",
        }
        return f"{label_rank(self.rank, names)} lacks {size}{purpose.get(self.kind, '')}"


def find_shortage(
    stage: int, model: ModelSize, profiles: Sequence[Profile], shares: Shares | None = None
) -> Shortage | None:
    """Return what is missing to train in `stage` with one sample at a time, or None if it fits.

    Micro-batches may be as small as one sample, so there must be room for every rank's states, and for one sample on
    one rank.
    """
    whole, cut = model.kept_bytes(stage, 0.0), model.whole_and_cut_bytes(stage)[1]
    free = np.array([profile.room_bytes for profile in profiles], np.float64) - whole
    if shares is not None:
        free -= np.array([model.kept_bytes(stage, share) for share in shares.fractions]) - whole
    worst = int(np.argmin(free))
    if free[worst] < 0:
        kind = ShortageKind.MINIMUM_STATES if cut and shares is None else ShortageKind.GIVEN_STATES
        return Shortage(kind, float(-free[worst]), worst)
    one_sample = np.array([float(profile.memory.table[1]) for profile in profiles])
    # What each rank would have left after one sample there, and after all that the others can hold of the rest.
    left = free - one_sample
    if shares is None and cut:
        room = np.minimum(free, cut)
        if room.sum() < cut * (1 - SHARE_SLACK):
            return Shortage(ShortageKind.SHARED_STATES, float(cut - room.sum()))
        left = np.minimum(left, left + room.sum() - room - cut)
    best = int(np.argmax(left))
    return Shortage(ShortageKind.ONE_SAMPLE, float(-left[best]), best) if left[best] < 0 else None


def fits(tables: CostTables, shares: Floats | None) -> bool:
    """Tell whether there is room for the states and for one sample on one rank."""
    if shares is not None:
        max_micro_batch = tables.max_micro_batch_beside(shares)
        return bool((max_micro_batch >= 0).all() and (max_micro_batch > 0).any())
    capacity = tables.shard_capacity[tables.kind_of]
    if capacity.shape[1] < 2 or (capacity[:, 0] < 0).any():
        return False
    others = capacity[:, 0].sum() - capacity[:, 0]
    return bool(((capacity[:, 1] >= 0) & (capacity[:, 1] + others >= 1.0 - SHARE_SLACK)).any())


def describe_no_fit(problem: Problem) -> str:
    """Return a sentence for a problem that fits in no stage: which rank lacks how much, and what would help."""
    stage = max(problem.stages)
    shortage = _shortage(problem, stage)
    assert shortage, f"stage {stage} fits"
    start = f"no stage fits: in stage {stage}" if len(set(problem.stages)) > 1 else f"stage {stage} does not fit:"
    start = f"{start} {shortage.describe(problem.names)}"
    if problem.shares is not None:
        return f"{start}; cut the model into other shares, or use a smaller one"
    higher = any(_shortage(problem, each) is None for each in STAGES if each > stage)
    remedy = _suggest_exclusion(problem) or _suggest_memory(problem, more_devices=shortage.rank is None)
    return f"{start}; {'allow a higher stage, ' if higher else ''}{remedy}, or use a smaller model"


def _shortage(problem: Problem, stage: int) -> Shortage | None:
    return find_shortage(stage, problem.model, problem.profiles, problem.shares)


def _suggest_exclusion(problem: Problem) -> str:
    """Return the advice to leave out the ranks with too little room, or nothing if the others have too little, too."""
    ranks = range(len(problem.profiles))
    for stage in sorted(set(problem.stages), reverse=True):
        kept = ranks_with_room(problem.model, stage, problem.profiles, ranks)
        excluded = [str(rank) for rank in ranks if rank not in kept]
        profiles = [problem.profiles[rank] for rank in kept]
        if kept and excluded and find_shortage(stage, problem.model, profiles) is None:
            single = "leave it out" if stage == max(problem.stages) else f"leave out rank {excluded[0]}"
            return single if len(excluded) == 1 else f"leave out ranks {join_names(excluded)}"
    return ""


def _suggest_memory(problem: Problem, *, more_devices: bool) -> str:
    """Return how much room would be enough, if as many devices had it."""
    count = len(problem.profiles)
    least = min(sufficient_bytes(stage, problem.model, problem.profiles) for stage in set(problem.stages))
    room = f"room for {_round_up(least)}"
    action = "add devices or" if more_devices else "use devices with more"
    return f"{action} memory ({f'{count} with {room} each' if count > 1 else f'one with {room}'} would fit)"


def ranks_with_room(model: ModelSize, stage: int, profiles: Sequence[Profile], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return those of `ranks` that have room for what a rank keeps even if its share is empty."""
    return tuple(rank for rank in ranks if profiles[rank].room_bytes >= model.kept_bytes(stage, 0.0))


def sufficient_bytes(stage: int, model: ModelSize, profiles: Sequence[Profile]) -> int:
    """Return the least room with which as many devices, if each had it, would fit a stage with one sample at a time."""
    whole, cut = model.kept_bytes(stage, 0.0), model.whole_and_cut_bytes(stage)[1]
    one_sample = max(float(profile.memory.table[1]) for profile in profiles)
    return whole + ceil(max(one_sample, (cut + one_sample) / len(profiles)))


def _round_up(count: int) -> str:
    """Return a size with three digits that is never less than `count`."""
    step = 10 ** max(0, len(str(count)) - 3)
    return spell_bytes(-(-count // step) * step)


def shares_by_room(stage: int, split: Split, model: ModelSize, profiles: Sequence[Profile]) -> Shares:
    """Return shares in the proportion of what is left on each rank after its micro-batches and unsharded states."""
    left = [
        max(0.0, profile.room_bytes - model.kept_bytes(stage, 0.0) - profile.memory.at(max(sizes, default=0)))
        for sizes, profile in zip(split.micro, profiles, strict=True)
    ]
    return Shares.of(left) if any(left) else Shares.equal(len(left))


def label_rank(rank: int, names: Sequence[str]) -> str:
    """Return a rank as sentences name it: `rank 1 (node/1)`."""
    return f"rank {rank} ({names[rank]})"
