"""All parameters that learn as one flat row, the same in every group whatever its stage: by the optimizer's groups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer
from mimatrix.hybrid.server.shard import Hyperparameters, OptimizerSpec, ParamSpan


@dataclass(frozen=True, slots=True)
class ParamRange:
    """Where the elements that this rank has of a parameter lie in the row."""

    parameter: int
    leaf: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Of one run: where everything lies."""

    optimizer: Optimizer
    places: tuple[ParamRange, ...]
    pieces: tuple[ParamSpan, ...]
    """The parameters, whole."""
    dtype: torch.dtype

    @classmethod
    def of(cls, binding: ShardedOptimizer, known: Sequence[Sequence[nn.Parameter]]) -> "FlatLayout":
        """`known`: the parameters of each of the optimizer's groups, whole."""
        dtypes = {parameter.dtype for group in known for parameter in group}
        if len(dtypes) != 1:
            raise UserError(
                f"the model has parameters of the types {sorted(map(str, dtypes))}; groups share parameters of one type"
            )
        places: list[ParamRange] = []
        pieces: list[ParamSpan] = []
        at = 0
        for group, parameter in ((number, each) for number, given in enumerate(known) for each in given):
            found = binding.slice_of(parameter)
            if found:
                first = found.start if found.value is not parameter else 0
                leaf = binding.leaves[parameter]
                places.append(ParamRange(len(pieces), leaf, at + first, at + first + leaf.numel()))
            pieces.append(ParamSpan(len(pieces), group, parameter.numel()))
            at += parameter.numel()
        return cls(binding.optimizer, tuple(places), tuple(pieces), dtypes.pop())

    @property
    def count(self) -> int:
        """Of all elements."""
        return sum(piece.count for piece in self.pieces)

    def touched(self) -> torch.Tensor:
        """1 for each parameter of which this rank has a gradient."""
        found = torch.zeros(len(self.pieces), dtype=torch.int64)
        for place in self.places:
            found[place.parameter] = place.leaf.grad is not None
        return found

    def read_gradients(self, row: torch.Tensor) -> None:
        """What this rank has of them, and nothing elsewhere."""
        row.zero_()
        for place in self.places:
            if place.leaf.grad is not None:
                row[place.start : place.stop].copy_(place.leaf.grad.reshape(-1))

    def read_values(self, row: torch.Tensor) -> None:
        """What this rank has of the parameters."""
        row.zero_()
        for place in self.places:
            row[place.start : place.stop].copy_(place.leaf.detach().reshape(-1))

    def write_values(self, row: torch.Tensor) -> None:
        """The parameters become those of the row."""
        with torch.no_grad():
            for place in self.places:
                place.leaf.copy_(row[place.start : place.stop].view_as(place.leaf))

    def settings(self) -> list[Hyperparameters]:
        """What the optimizer's groups are set to now."""
        return [
            {name: plain for name, value in group.items() if name != "params" and _is_plain(plain := _number(value))}
            for group in self.optimizer.param_groups
        ]

    def steppings(self, shares: Shares, outer: Hyperparameters | None = None) -> list[OptimizerSpec]:
        """How each shard is stepped: as the user's optimizer does, or by SGD with settings of its own."""
        kind = type(self.optimizer) if outer is None else torch.optim.SGD
        settings = tuple(self.settings() if outer is None else [outer for _ in self.settings()])
        return [OptimizerSpec(kind, settings, pieces) for pieces in split_spans(self.pieces, shares.cut(self.count))]


def split_spans(pieces: Sequence[ParamSpan], sizes: Sequence[int]) -> Iterator[tuple[ParamSpan, ...]]:
    """The pieces that lie in each shard: both are rows of the same length."""
    ends, at = list(accumulate(piece.count for piece in pieces)), 0
    for size in sizes:
        stop = at + size
        parts = (
            replace(piece, count=min(stop, end) - max(at, end - piece.count))
            for piece, end in zip(pieces, ends, strict=True)
        )
        yield tuple(part for part in parts if part.count > 0)
        at = stop


def _number(value: Any) -> Any:
    """Learning rates may be tensors."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
