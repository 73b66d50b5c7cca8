"""All trainable parameters as one flat tensor, in the order of the optimizer; the same in every group and stage."""

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
    """Where this rank's elements of a parameter lie in the flat tensor."""

    parameter: int
    leaf: nn.Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Where the parameters of one run lie in the flat tensor."""

    optimizer: Optimizer
    ranges: tuple[ParamRange, ...]
    spans: tuple[ParamSpan, ...]
    """All parameters, each complete."""
    dtype: torch.dtype

    @classmethod
    def build(cls, optimizer: ShardedOptimizer, param_groups: Sequence[Sequence[nn.Parameter]]) -> "FlatLayout":
        """Lay out the parameters, given complete for each of the optimizer's parameter groups.

        Raises:
            UserError: The parameters have several dtypes.
        """
        dtypes = {param.dtype for group in param_groups for param in group}
        if len(dtypes) != 1:
            raise UserError(
                f"the model has parameters of the types {sorted(map(str, dtypes))}; convert it to one type for "
                'mode="hybrid"'
            )
        ranges: list[ParamRange] = []
        spans: list[ParamSpan] = []
        offset = 0
        for number, param in ((number, param) for number, group in enumerate(param_groups) for param in group):
            shard = optimizer.find_shard(param)
            if shard:
                first = offset + (shard.start if shard.value is not param else 0)
                leaf = optimizer.shard_params[param]
                ranges.append(ParamRange(len(spans), leaf, first, first + leaf.numel()))
            spans.append(ParamSpan(len(spans), number, param.numel()))
            offset += param.numel()
        return cls(optimizer.optimizer, tuple(ranges), tuple(spans), dtypes.pop())

    @property
    def numel(self) -> int:
        """The number of elements of the flat tensor."""
        return sum(span.numel for span in self.spans)

    def grad_mask(self) -> torch.Tensor:
        """Return 1 for each parameter of which this rank has a gradient, otherwise 0."""
        mask = torch.zeros(len(self.spans), dtype=torch.int64)
        for part in self.ranges:
            mask[part.parameter] = part.leaf.grad is not None
        return mask

    def read_grads(self, flat: torch.Tensor) -> None:
        """Copy this rank's gradients into the flat tensor; all other elements become 0."""
        flat.zero_()
        for part in self.ranges:
            if part.leaf.grad is not None:
                flat[part.start : part.stop].copy_(part.leaf.grad.reshape(-1))

    def read_params(self, flat: torch.Tensor) -> None:
        """Copy this rank's parameters into the flat tensor; all other elements become 0."""
        flat.zero_()
        for part in self.ranges:
            flat[part.start : part.stop].copy_(part.leaf.detach().reshape(-1))

    def write_params(self, flat: torch.Tensor) -> None:
        """Copy the flat tensor into this rank's parameters."""
        with torch.no_grad():
            for part in self.ranges:
                part.leaf.copy_(flat[part.start : part.stop].view_as(part.leaf))

    def hyperparameters(self) -> list[Hyperparameters]:
        """Return the current hyperparameters of each parameter group that JSON can carry."""
        return [
            {name: plain for name, value in group.items() if name != "params" and _is_plain(plain := _to_number(value))}
            for group in self.optimizer.param_groups
        ]

    def optimizer_specs(self, shares: Shares, outer: Hyperparameters | None = None) -> list[OptimizerSpec]:
        """Return how to step each shard: with the user's optimizer, or with SGD if `outer` is given."""
        kind = type(self.optimizer) if outer is None else torch.optim.SGD
        hyperparameters = self.hyperparameters() if outer is None else [outer for _ in self.hyperparameters()]
        sizes = shares.cut(self.numel)
        return [OptimizerSpec(kind, tuple(hyperparameters), spans) for spans in split_spans(self.spans, sizes)]


def split_spans(spans: Sequence[ParamSpan], sizes: Sequence[int]) -> Iterator[tuple[ParamSpan, ...]]:
    """Yield the spans that lie in each shard; spans and shards cover the same flat tensor."""
    ends, start = list(accumulate(span.numel for span in spans)), 0
    for size in sizes:
        stop = start + size
        parts = (
            replace(span, numel=min(stop, end) - max(start, end - span.numel))
            for span, end in zip(spans, ends, strict=True)
        )
        yield tuple(part for part in parts if part.numel > 0)
        start = stop


def _to_number(value: Any) -> Any:
    """Return a tensor of one element, such as a learning rate, as a number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
