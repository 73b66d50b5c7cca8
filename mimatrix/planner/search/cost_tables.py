"""The devices of a job as arrays, for one stage: what a search looks things up in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimatrix.planner.model.profile import ModelSize, Profile

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# A hair more than a share needs: sums of shares round.
SLACK = 1e-12


@dataclass(frozen=True)
class Tables:
    """Ranks of one kind share a row; columns are samples of a micro-batch, from 0."""

    kind_of: Integers
    """The row of each rank."""
    seconds: Floats
    """Of a micro-batch; infinite where it was not measured or has no room even on a rank that owns nothing."""
    hold: Floats
    """The share that there is room for beside a micro-batch, at most 1; negative where there is none."""
    optimizer_s: Floats
    """Of each kind, over all elements."""

    @classmethod
    def of(cls, stage: int, model: ModelSize, profiles: Sequence[Profile]) -> "Tables":
        """What `profiles`, one for each rank, come to in `stage`."""
        kinds: dict[Profile, int] = {}
        kind_of = np.array([kinds.setdefault(profile, len(kinds)) for profile in profiles])
        width = 1 + max(_most(profile) for profile in kinds)
        seconds = np.full((len(kinds), width), np.inf)
        hold = np.full((len(kinds), width), -1.0)
        for row, profile in enumerate(kinds):
            count = 1 + _most(profile)
            seconds[row, :count] = profile.seconds.table[:count] + profile.handling_s[stage]
            hold[row, :count] = _hold(stage, model, profile)
        seconds[hold < 0] = np.inf
        seconds[:, 0] = 0.0
        # Shares are divided by this; below it nothing is worth telling apart.
        stepping = np.array([max(profile.optimizer_s, 1e-12) for profile in kinds])
        used = 1 + max(1, int(np.isfinite(seconds).sum(axis=1).max()) - 1)
        return cls(kind_of, seconds[:, :used], hold[:, :used], stepping)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.kind_of)

    @property
    def caps(self) -> Integers:
        """The largest micro-batch of each rank if it owned nothing."""
        return self.caps_beside(np.zeros(self.ranks))

    def caps_beside(self, shares: Floats) -> Integers:
        """The largest micro-batch of each rank beside its share; -1 where not even the share has room."""
        fits = self.hold[self.kind_of] >= shares[:, None] - SLACK
        caps: Integers = fits.sum(axis=1) - 1
        return caps

    def held(self, caps: Integers) -> Floats:
        """The share that each rank has room for beside micro-batches of `caps`."""
        held: Floats = self.hold[self.kind_of, caps]
        return held


def _most(profile: Profile) -> int:
    return min(profile.seconds.most, profile.memory.most)


def _hold(stage: int, model: ModelSize, profile: Profile) -> Floats:
    _, cut = model.whole_and_cut_bytes(stage)
    free = np.floor(profile.room_bytes - model.kept_bytes(stage, 0.0) - profile.memory.table[: 1 + _most(profile)])
    return np.where(free < 0, -1.0, np.minimum(1.0, free / cut) if cut else 1.0)
