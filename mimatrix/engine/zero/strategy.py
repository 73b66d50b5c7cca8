"""The one protocol of all ZeRO stages, what it speaks of, and its implementation for a single process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from mimatrix.comm.work import Work
from mimatrix.engine.zero.hooks import register_grad_hooks
from mimatrix.engine.zero.units import Unit, UnitParam

GRAD_OUTSIDE_BACKWARD = (
    "gradients came outside run.backward; call run.backward(loss) instead of loss.backward(), and model.requires_grad_("
    "False) around the loss of another model that runs through this one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShard:
    """Elements [start, stop) of a flattened parameter, which this rank steps, and their gradient."""

    param: UnitParam
    start: int
    stop: int
    value: torch.Tensor
    """The parameter itself, in its shape, where the rank steps the whole parameter."""
    grad: torch.Tensor | None
    """None where autograd leaves the gradient with the parameter."""


@dataclass(slots=True, eq=False, kw_only=True)
class UnitState:
    """What a rank has in memory of a unit."""

    unit: Unit
    shard_range: range
    """The elements of the flat unit whose gradient this rank sums, and steps from stage 1 on."""
    full: torch.Tensor
    """All parameters, flat (stages 1 to 3; in stage 3 its memory exists only while the unit is unsharded)."""
    shard: torch.Tensor
    """The parameters of `shard_range`, flat (stages 1 to 3)."""
    grads: torch.Tensor
    """Gradients of all parameters (stages 0 and 1), or of `shard_range`."""
    touched: set[int] = field(default_factory=set)
    """Which of the unit's parameters got a gradient in this global batch."""
    has_sums: bool = False
    """Whether `grads` has sums of this global batch already (stages 2 and 3)."""
    work: Work | None = None
    """The reduction of `grads` that is in flight (stages 0 and 1)."""

    @property
    def grad_shard(self) -> torch.Tensor:
        """The gradient of `shard_range`."""
        has_all = self.grads.numel() == self.unit.count
        return self.grads[self.shard_range.start : self.shard_range.stop] if has_all else self.grads


class ShardingStrategy(Protocol):
    """How parameters, gradients and optimizer state are sharded over the ranks, and what moves when.

    A global batch is: for each micro-step `begin_micro_step`, `begin_backward`, `grad_ready` or `grad_skipped` for
    every parameter, `end_micro_step`; then `finish_reduction`, the optimizer's step on `param_shards`,
    `all_gather_params` and `clear`. Ranks may have different numbers of micro-steps.
    """

    stage: int
    units: Sequence[Unit]
    grads_are_sharded: bool
    """Whether each rank has the sums of another part of the gradients, or all ranks have all."""
    reduces_every_micro_step: bool
    """Whether gradients are reduced in every micro-step, or once in a global batch."""
    is_sharded: bool
    """Whether each rank steps only its shard, so that the optimizer's state is sharded (stages 1 to 3)."""
    counts_forward_passes: bool
    """Whether a forward pass is collective, so that all ranks have to make the same number of them."""

    @property
    def launches_in_order(self) -> bool:
        """Whether NCCL carries the collectives of a step, which every rank should launch in the same order."""

    # A global batch

    def begin_micro_step(self, *, is_last: bool) -> None:
        """Begin a micro-step; `is_last` says that this rank has no further one in this global batch."""

    def begin_backward(self, loss: torch.Tensor | None) -> None:
        """Begin the backward pass of a loss, which is None where it does not count."""

    def grad_ready(self, param: nn.Parameter) -> None:
        """Accumulate the gradient that a parameter has just got."""

    def grad_skipped(self, param: nn.Parameter) -> None:
        """Note that a parameter gets no further gradient in this micro-step."""

    def end_micro_step(self) -> None:
        """End a micro-step after its backward pass, or without one."""

    def finish_reduction(self, micro_steps: int) -> None:
        """Join the reductions of all `micro_steps` of the rank that has most, and wait for the sums. A collective."""

    def touched(self) -> list[int]:
        """Return the indices of the parameters that got a gradient on this rank."""

    def local_grads(self) -> list[torch.Tensor]:
        """Return the gradients that this rank has to scale, each element once."""

    def grads_scaled(self) -> None:
        """Note that this rank has scaled its gradients. All ranks call it."""

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield what this rank steps of every trainable parameter; nothing for some."""

    def all_gather_params(self) -> None:
        """Let every rank see the parameters that the others have stepped. A collective."""

    def clear(self) -> None:
        """Forget the gradients, so that the next global batch can begin."""

    # A prepared model

    def register_hooks(self, model: nn.Module, on_grad: Callable[[nn.Parameter], None]) -> None:
        """Register the hooks that the stage needs; `on_grad`, a method, is called with each parameter's gradient."""

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0. A collective."""

    def check_params_in_place(self) -> None:
        """Raise `UserError` if a parameter was moved or cast since it was sharded."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that are allocated now, by kind."""

    def close(self) -> None:
        """Return what was allocated in the arena."""

    def launch_order(self) -> str:
        """Return the order in which this rank launched gathers and reductions in its last micro-step, if it matters.

        A letter for each: `g` and `r`. Empty if there is one order only, or if this rank has not had data yet.
        """

    def adopt_launch_order(self, order: str) -> None:
        """Take part in that order in micro-steps for which this rank has no data."""

    # Evaluation and checkpoints

    def forward_passes(self) -> int:
        """Return how many forward passes there were; always 0 where they are not counted."""

    def forward_without_data(self) -> None:
        """Join one forward pass of the other ranks, where that is collective."""

    def full_params(self, unit: Unit) -> torch.Tensor:
        """Return all parameters of a unit in a new flat buffer. A collective, in the order of units."""

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters and persistent buffers of the full model on the CPU. A collective."""

    def owned_range(self, unit: Unit) -> range:
        """Return the elements of a unit that this rank saves; where all ranks have all, an equal part."""

    def owned_values(self, unit: Unit) -> torch.Tensor | None:
        """Return the flat parameters of `owned_range` where they are sharded, else None."""

    def reload_params(self) -> None:
        """Gather full parameters, frozen ones too, after each rank has loaded its shard. A collective."""


class SingleProcess:
    """The strategy of one rank: nothing is sharded, and gradients stay where autograd leaves them."""

    stage = 0
    grads_are_sharded = False
    reduces_every_micro_step = False
    is_sharded = False
    counts_forward_passes = False
    launches_in_order = False

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._trainable = [param for unit in units if unit.trainable for param in unit.params]
        self._memory = {"parameters": sum(unit.bytes for unit in units)}

    def begin_micro_step(self, *, is_last: bool) -> None:
        """Do nothing: nothing is reduced."""

    def begin_backward(self, loss: torch.Tensor | None) -> None:
        """Do nothing: parameters are always here."""

    def grad_ready(self, param: nn.Parameter) -> None:
        """Do nothing: autograd has accumulated the gradient."""

    def grad_skipped(self, param: nn.Parameter) -> None:
        """Do nothing: nothing waits for the gradient."""

    def end_micro_step(self) -> None:
        """Do nothing: nothing is reduced."""

    def finish_reduction(self, micro_steps: int) -> None:
        """Do nothing: the sums are here."""

    def touched(self) -> list[int]:
        """Return the indices of the parameters that have a gradient."""
        return [param.index for param in self._trainable if param.parameter.grad is not None]

    def local_grads(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters that have one."""
        return [param.parameter.grad for param in self._trainable if param.parameter.grad is not None]

    def grads_scaled(self) -> None:
        """Do nothing: no other rank reads them."""

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield every trainable parameter as a whole."""
        for param in self._trainable:
            yield ParamShard(param=param, start=0, stop=param.shape.numel(), value=param.parameter, grad=None)

    def all_gather_params(self) -> None:
        """Do nothing: all parameters were stepped here."""

    def clear(self) -> None:
        """Drop all gradients, also of parameters that the optimizer does not have."""
        for param in self._trainable:
            param.parameter.grad = None

    def register_hooks(self, model: nn.Module, on_grad: Callable[[nn.Parameter], None]) -> None:  # noqa: ARG002
        """Call `on_grad`, a method, with every parameter that has just got its gradient."""
        register_grad_hooks(self.units, on_grad)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Do nothing: there is no other rank."""

    def check_params_in_place(self) -> None:
        """Do nothing: parameters may be moved."""

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the parameters."""
        return self._memory

    def close(self) -> None:
        """Do nothing: nothing was allocated."""

    def launch_order(self) -> str:
        """Return "": nothing is launched."""
        return ""

    def adopt_launch_order(self, order: str) -> None:
        """Do nothing: there is no other rank."""

    def forward_passes(self) -> int:
        """Return 0: forward passes are not counted."""
        return 0

    def forward_without_data(self) -> None:
        """Do nothing: there is no other rank."""

    def full_params(self, unit: Unit) -> torch.Tensor:
        """Return all parameters of a unit in a new flat buffer."""
        return unit.flatten()

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of the model's parameters and persistent buffers on the CPU."""
        return cpu_state_dict(model)

    def owned_range(self, unit: Unit) -> range:
        """Return all elements of a unit."""
        return range(unit.count)

    def owned_values(self, unit: Unit) -> torch.Tensor | None:  # noqa: ARG002 (the protocol's)
        """Return None: nothing is sharded."""
        return None

    def reload_params(self) -> None:
        """Do nothing: full parameters were loaded."""


def cpu_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of what a model's own `state_dict` has, on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
