"""Batch norm over a micro-step's samples of all ranks. Torch's own `SyncBatchNorm` refuses CPU tensors.

Every rank contributes the mean, the sum of squared deviations and the count of its samples; they are merged exactly.
A rank that shadows a micro-step, since it has no data in it, contributes a count of zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimatrix.collectives.shares import Shares
from mimatrix.comm.control.user_calls import Caller
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.user_calls import MODEL_IN_BATCH
from mimatrix.engine.zero.units import is_compiled


@dataclass(frozen=True, slots=True)
class SyncContext:
    """The group over which batch norms are synchronised. Copies of a model share it."""

    group: Group
    is_shadowing: Callable[[], bool]
    """Whether this rank runs the model without data, for the sake of the others."""
    timer: StepTimer

    def run(self, start: Callable[..., Work], tensor: torch.Tensor) -> None:
        """Run a collective on a tensor; the time that it takes was not hidden behind computation."""
        if self.group.launches(tensor):
            self.timer.wait(start(wait=False))
            return
        with self.timer.exposed():
            start()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncContext":
        return self


class SyncBatchNorm(_BatchNorm):
    """A batch norm of any number of dimensions, trained over the samples of all ranks."""

    sync_context: SyncContext

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.dim()}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise as one process would with the samples of all ranks, and update the running statistics."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        y: torch.Tensor
        outputs = _SyncBatchNormFunction.apply(x, self.weight, self.bias, self.eps, self.sync_context)  # type: ignore[no-untyped-call]
        y, mean, variance, count = outputs
        self._update_running_stats(mean, variance, float(count))
        return y

    @torch.no_grad()
    def _update_running_stats(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * (count / max(count - 1, 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        context: SyncContext,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        dims = [dim for dim in range(x.dim()) if dim != 1]
        is_shadowing = context.is_shadowing()
        mean, variance, count = _merge_stats(x.to(exact), dims, context, is_shadowing)
        scale = torch.rsqrt(variance + eps)
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x.to(exact) - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.context, ctx.is_shadowing, ctx.has_bias = context, is_shadowing, bias is not None
        ctx.dims, ctx.shape = dims, shape
        y = normal if weight is None else normal * weight.to(exact).view(shape)
        y = y if bias is None else y + bias.to(exact).view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = dy.to(normal.dtype)
        if ctx.is_shadowing:
            grad = torch.zeros_like(grad)
        sums = torch.stack([grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)])
        local_sums = sums.clone()
        ctx.context.run(partial(ctx.context.group.all_reduce, sums), sums)
        mean_grad, mean_projection = (sums / count).view(2, *ctx.shape)
        inner = grad - mean_grad - normal * mean_projection
        factor = scale if weight is None else scale * weight.to(normal.dtype)
        dx = (inner * factor.view(ctx.shape)).to(dy.dtype)
        dweight = local_sums[1].to(weight.dtype) if weight is not None else None
        dbias = local_sums[0].to(weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None


def _merge_stats(
    x: torch.Tensor, dims: list[int], context: SyncContext, is_shadowing: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance and count over the samples of all ranks, bit for bit the same on each."""
    channels, group = x.shape[1], context.group
    table = torch.zeros(group.world_size, 2 * channels + 1, dtype=x.dtype, device=x.device)
    if not is_shadowing:
        variance, mean = torch.var_mean(x, dims, correction=0)
        count = x.numel() // channels
        table[group.rank] = torch.cat([mean, variance * count, mean.new_tensor([count])])
    with group.caller.calling(MODEL_IN_BATCH):
        context.run(partial(group.all_gather, table.view(-1), shares=Shares.equal(group.world_size)), table)
    counts = table[:, -1:]
    means, squares = table[:, :channels], table[:, channels:-1]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    squared = squares.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, squared / total, total


def convert_sync_batchnorm(model: nn.Module, group: Group, is_shadowing: Callable[[], bool], timer: StepTimer) -> int:
    """Turn every batch norm of a model into a `SyncBatchNorm`, in place, and return how many there were."""
    modules = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    compiled, context = is_compiled(model), SyncContext(group, is_shadowing, timer)
    for module in modules:
        # The same object with the same parameters and buffers, so that all references to it stay good.
        module.__class__ = SyncBatchNorm
        module.sync_context = context  # type: ignore[assignment]
        if compiled:  # a collective cannot be traced
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign,no-untyped-call]
    return len(modules)


@contextmanager
def unsynchronised(model: nn.Module, timer: StepTimer) -> Iterator[None]:
    """Let batch norms compute as synchronised ones do, but without other ranks: for measuring."""
    classes = {module: type(module) for module in model.modules() if isinstance(module, _BatchNorm)}
    for module in classes:
        module.__class__ = SyncBatchNorm
        module.sync_context = SyncContext(_SingleRankGroup(), lambda: False, timer)  # type: ignore[assignment,arg-type]
    try:
        yield
    finally:
        for module, original in classes.items():
            del module.sync_context
            module.__class__ = original


class _SingleRankGroup:
    """A stand-in for a group of one rank, with nothing to exchange."""

    world_size, rank = 1, 0

    def __init__(self) -> None:
        self.caller = Caller()

    def launches(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002 (a group's)
        """Return False: nothing is launched."""
        return False

    def all_gather(self, tensor: torch.Tensor, shares: Shares) -> None:
        """Do nothing: all parts are here."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Do nothing: the sum is here."""


def count_batchnorms(model: nn.Module) -> int:
    """Return how many batch norms a model has, which ranks would synchronise in every micro-step."""
    return sum(isinstance(module, _BatchNorm) for module in model.modules())
