"""Whether a stage fits, and if not, who lacks how much."""

from collections.abc import Sequence
from math import ceil

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.planner.model.problem import Problem
from mimatrix.planner.model.profile import STAGES, ModelSize, Profile
from mimatrix.planner.model.split import Split
from mimatrix.planner.search.cost_tables import SLACK, Floats, Tables


def lacks(
    stage: int, model: ModelSize, profiles: Sequence[Profile], names: Sequence[str], shares: Shares | None
) -> str:
    """Who lacks how many bytes to train in `stage`, with one sample at a time; empty where it fits.

    Micro-batches may be as small as one sample, so what must have room is every rank's states, and one sample
    somewhere.
    """
    whole, cut = model.kept_bytes(stage, 0.0), model.whole_and_cut_bytes(stage)[1]
    free = np.array([profile.room_bytes for profile in profiles], np.float64) - whole
    if shares is not None:
        free -= np.array([model.kept_bytes(stage, share) for share in shares.fractions]) - whole
    worst = int(np.argmin(free))
    if free[worst] < 0:
        more = " even if it owns nothing" if cut and shares is None else ""
        return f"{named(worst, names)} lacks {bytes_shown(-free[worst])}{more}"
    one = np.array([float(profile.memory.table[1]) for profile in profiles])
    # What each rank would have left after one sample there, and after all that the others can hold of the rest.
    left = free - one
    if shares is None and cut:
        room = np.minimum(free, cut)
        if room.sum() < cut * (1 - SLACK):
            return f"all ranks together lack {bytes_shown(cut - room.sum())}"
        left = np.minimum(left, left + room.sum() - room - cut)
    best = int(np.argmax(left))
    return f"{named(best, names)} lacks {bytes_shown(-left[best])} for one sample at a time" if left[best] < 0 else ""


def fits(tables: Tables, shares: Floats | None) -> bool:
    """Whether there is room for the states and for one sample somewhere."""
    if shares is not None:
        caps = tables.caps_beside(shares)
        return bool((caps >= 0).all() and (caps > 0).any())
    hold = tables.hold[tables.kind_of]
    if hold.shape[1] < 2 or (hold[:, 0] < 0).any():
        return False
    beside = hold[:, 0].sum() - hold[:, 0]
    return bool(((hold[:, 1] >= 0) & (hold[:, 1] + beside >= 1.0 - SLACK)).any())


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a, b and c`; of many the first `most` and how many more."""
    if len(names) > most + 1:
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def nothing_fits(problem: Problem) -> str:
    """Who lacks how much in the highest stage, and what would help; a sentence for where no stage fits."""
    stage = max(problem.stages)
    said = _lacks(problem, stage)
    start = f"no stage fits: in stage {stage}" if len(set(problem.stages)) > 1 else f"stage {stage} does not fit:"
    if problem.shares is not None:
        return f"{start} {said}; cut the model into other shares, or use a smaller one"
    higher = any(not _lacks(problem, each) for each in STAGES if each > stage)
    remedy = _leaving_out(problem) or _enough(
        problem, "add devices or" if "together" in said else "use devices with more"
    )
    return f"{start} {said}; {'allow a higher stage, ' if higher else ''}{remedy}, or use a smaller model"


def _lacks(problem: Problem, stage: int) -> str:
    return lacks(stage, problem.model, problem.profiles, problem.names, problem.shares)


def _leaving_out(problem: Problem) -> str:
    """To do without those that have too little room, where the others have enough."""
    ranks = range(len(problem.profiles))
    for stage in sorted(set(problem.stages), reverse=True):
        kept = able(problem.model, stage, problem.profiles, ranks)
        out = [str(rank) for rank in ranks if rank not in kept]
        profiles = [problem.profiles[rank] for rank in kept]
        if kept and out and not lacks(stage, problem.model, profiles, problem.names, None):
            alone = "leave it out" if stage == max(problem.stages) else f"leave out rank {out[0]}"
            return alone if len(out) == 1 else f"leave out ranks {listed(out)}"
    return ""


def _enough(problem: Problem, what: str) -> str:
    """How much room would be enough, if as many devices had it."""
    count = len(problem.profiles)
    least = min(enough_bytes(stage, problem.model, problem.profiles) for stage in set(problem.stages))
    room = f"room for {_rounded_up(least)}"
    return f"{what} memory ({f'{count} with {room} each' if count > 1 else f'one with {room}'} would fit)"


def able(model: ModelSize, stage: int, profiles: Sequence[Profile], ranks: Sequence[int]) -> tuple[int, ...]:
    """Those of `ranks` that have room for what a rank keeps that owns nothing."""
    return tuple(rank for rank in ranks if profiles[rank].room_bytes >= model.kept_bytes(stage, 0.0))


def enough_bytes(stage: int, model: ModelSize, profiles: Sequence[Profile]) -> int:
    """The least room with which as many devices, if each had it, would fit a stage: one of them does a sample."""
    whole, cut = model.kept_bytes(stage, 0.0), model.whole_and_cut_bytes(stage)[1]
    one = max(float(profile.memory.table[1]) for profile in profiles)
    return whole + ceil(max(one, (cut + one) / len(profiles)))


def bytes_shown(count: float) -> str:
    """As in a sentence: `120 MB`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {prefix}B"
    return f"{count:.0f} bytes"


def _rounded_up(count: int) -> str:
    """With three digits, and never less than `count`."""
    step = 10 ** max(0, len(str(count)) - 3)
    return bytes_shown(-(-count // step) * step)


def by_room(stage: int, split: Split, model: ModelSize, profiles: Sequence[Profile]) -> Shares:
    """Shares in the proportion of what is left on each rank beside its micro-batches and what nobody cuts."""
    left = [
        max(0.0, profile.room_bytes - model.kept_bytes(stage, 0.0) - profile.memory.at(max(sizes, default=0)))
        for sizes, profile in zip(split.micro, profiles, strict=True)
    ]
    return Shares.of(left) if any(left) else Shares.equal(len(left))


def named(rank: int, names: Sequence[str]) -> str:
    """As in a sentence."""
    return f"rank {rank} ({names[rank]})"
