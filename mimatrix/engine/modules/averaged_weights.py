"""Averages of the weights, sharded as the weights are: each rank averages what it owns, and nothing is communicated."""

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from mimatrix.core.errors import UserError
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.engine.zero.units import Unit, UnitParam

Kind = Literal["ema", "swa"]

logger = logging.getLogger(__name__)


class AveragedWeights:
    """The part of one average that this rank has: whole parameters where nothing is sharded, otherwise its shards.

    Frozen parameters have no average: it would be the parameter itself.
    """

    def __init__(self, kind: Kind, strategy: ShardingStrategy) -> None:
        self.kind, self._strategy = kind, strategy
        self.decay = 0.0
        """How much of an EMA stays in each update."""
        self.updates = 0
        self._tensors: dict[Unit | UnitParam, torch.Tensor] = {}

    @classmethod
    def start(cls, kind: Kind, strategy: ShardingStrategy) -> "AveragedWeights":
        """Return an average that begins with the weights as they are."""
        average = cls(kind, strategy)
        average._tensors = {key: weights.clone() for key, weights in average._weights()}
        return average

    def restart(self) -> None:
        """Begin again with the weights as they are."""
        self.updates = 0
        self._copy_weights()

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights to the average; the first time it becomes them."""
        if not self.updates:
            self._copy_weights()
        else:
            weight = 1 - self.decay if self.kind == "ema" else 1 / (self.updates + 1)
            pairs = [(self._tensors[key], weights) for key, weights in self._weights() if weights.numel()]
            if pairs:
                averages, values = (list(tensors) for tensors in zip(*pairs, strict=True))
                torch._foreach_lerp_(averages, values, weight)
        self.updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange this rank's weights and their average, in place."""
        for key, weights in self._weights():
            before = weights.clone()
            weights.copy_(self._tensors[key])
            self._tensors[key].copy_(before)

    def values(self, unit: Unit, param: UnitParam, elements: range) -> torch.Tensor:
        """Return the average of these elements of a parameter, which this rank owns."""
        if param in self._tensors:
            return self._tensors[param].reshape(-1)[elements.start : elements.stop]
        if not elements:
            return self._tensors[unit][:0]
        offset = param.start - self._strategy.owned_range(unit).start
        return self._tensors[unit][offset + elements.start : offset + elements.stop]

    def whole(self, param: UnitParam) -> torch.Tensor:
        """Return the average of a parameter where nothing is sharded."""
        return self._tensors[param]

    @torch.no_grad()
    def copy_weights_of(self, unit: Unit, param: UnitParam) -> None:
        """Let the average of a parameter be the parameter as it is."""
        if param in self._tensors:
            self._tensors[param].copy_(param.parameter.detach())
            return
        shard, owned = self._strategy.owned_values(unit), self._strategy.owned_range(unit)
        assert shard is not None
        start, stop = (min(max(end, owned.start), owned.stop) - owned.start for end in (param.start, param.stop))
        self._tensors[unit][start:stop].copy_(shard[start:stop])

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for key, weights in self._weights():
            self._tensors[key].copy_(weights)

    def _weights(self) -> Iterator[tuple[Unit | UnitParam, torch.Tensor]]:
        """Yield what this rank owns of the trainable weights, under the key of its average."""
        for unit in self._strategy.units:
            if not unit.trainable:
                continue
            shard = self._strategy.owned_values(unit)
            if shard is not None:
                yield unit, shard
            else:
                yield from ((param, param.parameter.detach()) for param in unit.params)


class AverageRegistry:
    """All averages of a run, in the order in which the script made them."""

    def __init__(self) -> None:
        self.averages: list[AveragedWeights] = []
        self.unclaimed: list[AveragedWeights] = []
        """Those of a loaded checkpoint that the script has not made yet."""
        self.is_first_rank = True
        """Whether this rank tells the user what is wrong with all."""
        self.applied: AveragedWeights | None = None
        """The one whose values the model has now in place of its own."""

    def make(self, kind: Kind, strategy: ShardingStrategy) -> AveragedWeights:
        """Return a new average, or the next of this kind that a checkpoint has brought."""
        average = next((average for average in self.unclaimed if average.kind == kind), None)
        if average is None:
            average = AveragedWeights.start(kind, strategy)
        else:
            self.unclaimed.remove(average)
        self.averages.append(average)
        return average

    @property
    def all(self) -> list[AveragedWeights]:
        """All averages that a checkpoint has, those included that the script has not made yet."""
        return [*self.averages, *self.unclaimed]

    def find(self, kind: Kind, number: int) -> AveragedWeights | None:
        """Return the average with this number among those of its kind that the script has made."""
        of_kind = [average for average in self.averages if average.kind == kind]
        return of_kind[number] if number < len(of_kind) else None

    def update(self) -> None:
        """Update every EMA: a global batch was stepped."""
        self.check_not_applied("a global batch was trained")
        for average in self.averages:
            if average.kind == "ema":
                average.update()
        if any(average.kind == "ema" for average in self.unclaimed):
            level = logging.WARNING if self.is_first_rank else logging.DEBUG
            logger.log(
                level, "the checkpoint has an EMA that the script has not made before its first step; it is dropped"
            )
            self.unclaimed = [average for average in self.unclaimed if average.kind != "ema"]

    def check_not_applied(self, what: str) -> None:
        """Refuse what needs the model's own weights."""
        if self.applied:
            raise UserError(f"{what} inside {self.applied.kind}.applied(); leave that `with` block first")


def check_same_updates(kind: str, updates: Sequence[int]) -> None:
    """Raise `UserError` if an average was not updated equally often on all ranks."""
    for rank, count in enumerate(updates):
        if count != updates[0]:
            raise UserError(
                f"the {kind.upper()} was updated {updates[0]} times on rank 0 and {count} times on rank {rank}; update "
                "it on all ranks"
            )
