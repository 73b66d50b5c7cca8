"""The devices of a job as arrays, for one stage: what the search looks costs up in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimatrix.planner.model.profile import ModelSize, Profile
from mimatrix.planner.search.limits import SHARE_SLACK

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class CostTables:
    """Ranks of one kind share a row; columns are samples of a micro-batch, from 0."""

    kind_of: Integers
    """The row of each rank."""
    seconds: Floats
    """Of a micro-batch; infinite if it was not measured or has no room even on a rank that owns nothing."""
    shard_capacity: Floats
    """The share that there is room for next to a micro-batch, at most 1; negative if there is none."""
    optimizer_s: Floats
    """Of each kind, over all elements."""

    @classmethod
    def of(cls, stage: int, model: ModelSize, profiles: Sequence[Profile]) -> "CostTables":
        """Return the tables of `profiles`, one for each rank, in `stage`."""
        kinds: dict[Profile, int] = {}
        kind_of = np.array([kinds.setdefault(profile, len(kinds)) for profile in profiles])
        width = 1 + max(_largest(profile) for profile in kinds)
        seconds = np.full((len(kinds), width), np.inf)
        shard_capacity = np.full((len(kinds), width), -1.0)
        for row, profile in enumerate(kinds):
            count = 1 + _largest(profile)
            seconds[row, :count] = profile.seconds.table[:count] + profile.handling_s[stage]
            shard_capacity[row, :count] = _shard_capacity(stage, model, profile)
        seconds[shard_capacity < 0] = np.inf
        seconds[:, 0] = 0.0
        # Shares are divided by this; below it nothing is worth telling apart.
        stepping = np.array([max(profile.optimizer_s, 1e-12) for profile in kinds])
        used = 1 + max(1, int(np.isfinite(seconds).sum(axis=1).max()) - 1)
        return cls(kind_of, seconds[:, :used], shard_capacity[:, :used], stepping)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.kind_of)

    @property
    def max_micro_batch(self) -> Integers:
        """The largest micro-batch of each rank if it owned nothing."""
        return self.max_micro_batch_beside(np.zeros(self.ranks))

    def max_micro_batch_beside(self, shares: Floats) -> Integers:
        """Return the largest micro-batch of each rank next to its share; -1 if not even the share has room."""
        fits = self.shard_capacity[self.kind_of] >= shares[:, None] - SHARE_SLACK
        largest: Integers = fits.sum(axis=1) - 1
        return largest

    def shard_capacity_beside(self, max_micro_batch: Integers) -> Floats:
        """Return the share that each rank has room for next to its largest micro-batch."""
        capacity: Floats = self.shard_capacity[self.kind_of, max_micro_batch]
        return capacity


def _largest(profile: Profile) -> int:
    return min(profile.seconds.most, profile.memory.most)


def _shard_capacity(stage: int, model: ModelSize, profile: Profile) -> Floats:
    _, cut = model.whole_and_cut_bytes(stage)
    free = np.floor(profile.room_bytes - model.kept_bytes(stage, 0.0) - profile.memory.table[: 1 + _largest(profile)])
    return np.where(free < 0, -1.0, np.minimum(1.0, free / cut) if cut else 1.0)
