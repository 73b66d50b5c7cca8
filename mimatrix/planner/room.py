"""Whether a stage fits, and if not, who lacks how much."""

from collections.abc import Sequence

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.planner.profile import ModelSize, Profile
from mimatrix.planner.split import Split
from mimatrix.planner.tables import SLACK, Floats, Tables


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
        return f"{_named(worst, names)} lacks {bytes_shown(-free[worst])}{more}"
    one = np.array([float(profile.memory.table[1]) for profile in profiles])
    # What each rank would have left after one sample there, and after all that the others can hold of the rest.
    left = free - one
    if shares is None and cut:
        room = np.minimum(free, cut)
        if room.sum() < cut * (1 - SLACK):
            return f"all ranks together lack {bytes_shown(cut - room.sum())}"
        left = np.minimum(left, left + room.sum() - room - cut)
    best = int(np.argmax(left))
    return f"{_named(best, names)} lacks {bytes_shown(-left[best])} for one sample at a time" if left[best] < 0 else ""


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


def bytes_shown(count: float) -> str:
    """As in a sentence: `120 MB`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {prefix}B"
    return f"{count:.0f} bytes"


def _named(rank: int, names: Sequence[str]) -> str:
    return f"rank {rank} ({names[rank]})"


def by_room(stage: int, split: Split, model: ModelSize, profiles: Sequence[Profile]) -> Shares:
    """Shares in the proportion of what is left on each rank beside its micro-batches and what nobody cuts."""
    left = [
        max(0.0, profile.room_bytes - model.kept_bytes(stage, 0.0) - profile.memory.at(max(sizes, default=0)))
        for sizes, profile in zip(split.micro, profiles, strict=True)
    ]
    return Shares.of(left) if any(left) else Shares.equal(len(left))
