"""Batch norm over the union of a micro-step's samples on all ranks. Torch's own synchronised form refuses CPU tensors.

Every rank brings the mean, the sum of squared deviations and the count of its samples; they are merged exactly. A rank
that takes part without data (a ghost) brings a count of zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.units import is_compiled


@dataclass(frozen=True, slots=True)
class SyncContext:
    """Where the ranks meet. A copy of a model meets there too."""

    group: Group
    is_ghost: Callable[[], bool]
    watch: StepTimer

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncContext":
        return self


class SyncBatchNorm(_BatchNorm):
    """A batch norm of any number of dimensions, trained over the samples of all ranks."""

    meeting: SyncContext

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.dim()}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As one process would with all samples of the micro-step."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        y: torch.Tensor
        found = _SyncBatchNormFunction.apply(x, self.weight, self.bias, self.eps, self.meeting)  # type: ignore[no-untyped-call]
        y, mean, variance, count = found
        self._remember(mean, variance, float(count))
        return y

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        unbiased = variance * (count / max(count - 1, 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        meeting: SyncContext,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        dims = [dim for dim in range(x.dim()) if dim != 1]
        ghost = meeting.is_ghost()
        mean, variance, count = _merged(x.to(exact), dims, meeting, ghost)
        scale = torch.rsqrt(variance + eps)
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x.to(exact) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.meeting, ctx.ghost, ctx.dims, ctx.shape, ctx.has_bias = meeting, ghost, dims, shape, bias is not None
        y = normal if weight is None else normal * weight.to(exact).view(shape)
        y = y if bias is None else y + bias.to(exact).view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = dy.to(normal.dtype)
        if ctx.ghost:
            grad = torch.zeros_like(grad)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)])
        own = sums.clone()
        with ctx.meeting.watch.apart():
            ctx.meeting.group.all_reduce(sums)
        about, along = (sums / count).view(2, *ctx.shape)
        inner = grad - about - normal * along
        factor = scale if weight is None else scale * weight.to(normal.dtype)
        dx = (inner * factor.view(ctx.shape)).to(dy.dtype)
        dweight = own[1].to(weight.dtype) if weight is not None else None
        dbias = own[0].to(weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None


def _merged(
    x: torch.Tensor, dims: list[int], meeting: SyncContext, ghost: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, variance and count over the samples of all ranks, the same to the last bit on each."""
    channels, group = x.shape[1], meeting.group
    table = torch.zeros(group.world_size, 2 * channels + 1, dtype=x.dtype, device=x.device)
    if not ghost:
        variance, mean = torch.var_mean(x, dims, correction=0)
        count = x.numel() // channels
        table[group.rank] = torch.cat([mean, variance * count, mean.new_tensor([count])])
    with meeting.watch.apart():
        group.all_gather(table.view(-1), shares=Shares.equal(group.world_size))
    counts = table[:, -1:]
    means, squares = table[:, :channels], table[:, channels:-1]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squared = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, squared / total, total


def synchronise(model: nn.Module, group: Group, is_ghost: Callable[[], bool], watch: StepTimer) -> int:
    """Turn every batch norm of a model into a synchronised one, in place; how many there were."""
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    compiled, meeting = is_compiled(model), SyncContext(group, is_ghost, watch)
    for module in found:
        # The same object with the same parameters and buffers: whoever holds it sees it synchronised.
        module.__class__ = SyncBatchNorm
        module.meeting = meeting  # type: ignore[assignment]
        if compiled:  # ranks meet in it, which cannot be traced
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
    return len(found)


@contextmanager
def alone(model: nn.Module, watch: StepTimer) -> Iterator[None]:
    """While this lasts, batch norms compute as synchronised ones do, but nobody else comes: for measuring."""
    kinds = {module: type(module) for module in model.modules() if isinstance(module, _BatchNorm)}
    for module in kinds:
        module.__class__ = SyncBatchNorm
        module.meeting = SyncContext(_SingleRankGroup(), lambda: False, watch)  # type: ignore[assignment,arg-type]
    try:
        yield
    finally:
        for module, kind in kinds.items():
            del module.meeting
            module.__class__ = kind


class _SingleRankGroup:
    """In the place of a group: one rank, and nothing to exchange."""

    world_size, rank = 1, 0

    def all_gather(self, tensor: torch.Tensor, shares: Shares) -> None:
        """All of it is here."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum is here."""


def count(model: nn.Module) -> int:
    """In how many places samples of a batch meet."""
    return sum(isinstance(module, _BatchNorm) for module in model.modules())
