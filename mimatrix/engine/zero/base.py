"""What all ZeRO stages have in common: accumulate gradients, reduce them in one order, wait for the sums.

    stage  sharded                what moves
    0      nothing                gradients are all-reduced once in a global batch, by unit, during the backward pass
    1      optimizer state        gradients are reduce-scattered instead; then the parameters are all-gathered
    2      + gradients            gradients are reduce-scattered in every micro-step; then as in stage 1
    3      + parameters           parameters are all-gathered unit by unit before use and freed after it; gradients as 2

The order of all collectives is fixed (see `ordering`), so that a rank without data can take part with zeros.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.buffers import Buffers
from mimatrix.engine.zero.hooks import register_grad_hooks
from mimatrix.engine.zero.ordering import GradReducer
from mimatrix.engine.zero.strategy import ParamShard, UnitState, cpu_state_dict
from mimatrix.engine.zero.units import Unit, UnitParam


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingContext:
    """What a strategy of several ranks works with."""

    group: Group
    gather_group: Group
    """For gathering parameters in stage 3; elsewhere the same as `group`."""
    units: Sequence[Unit]
    shares: Shares
    """How much of every unit each rank owns."""
    timer: StepTimer
    buffers: Buffers


class DistributedStrategy(ABC):
    """A `ShardingStrategy` of several ranks. Constructing one is local; `shard` is a collective."""

    stage: int
    grads_are_sharded: bool
    reduces_every_micro_step = False
    is_sharded = False
    counts_forward_passes = False

    def __init__(self, context: ShardingContext) -> None:
        self.group, self._gather_group = context.group, context.gather_group
        self.units, self.shares = context.units, context.shares
        self.buffers, self._timer = context.buffers, context.timer
        self.states: dict[Unit, UnitState] = {}
        """What this rank has of each unit, once it is sharded."""
        self._location = {
            param.parameter: (unit, number)
            for unit in self.units
            for number, param in enumerate(unit.params)
            if unit.trainable
        }
        self._reducer: GradReducer | None = None
        """The order of this micro-step's reductions, where it is reduced."""
        self._reductions = 0
        """Times that all units were reduced in this global batch."""
        self.overlaps = can_overlap(self.group, self.units)
        """Whether gradients are reduced during the backward pass, or after it."""
        self._is_launched = False
        """Whether NCCL carries all collectives of a step, so that the host waits for none of them; otherwise none."""

    def shard(self) -> None:
        """Give all ranks the parameters of rank 0 and lay them out as the stage needs. A collective."""
        self.states = {unit: self._shard_unit(unit) for unit in self.units}
        if self.group.launches(torch.empty(0, device=self.units[0].device)):
            self._tune()

    @property
    def launches_in_order(self) -> bool:
        """Whether NCCL carries the collectives of a step, which every rank should launch in the same order."""
        return self._is_launched

    def _tune(self) -> None:
        """Have all collectives of a step measured now, and decide whether NCCL or windows carry them, all alike.

        Later, ranks would come to the measurements in other orders.
        """
        groups = {self.group, self._gather_group}
        for group in groups:
            group.restrict_gpus(windows=None)
        launched, seconds = set[bool](), {True: 0.0, False: 0.0}
        for unit in self.units:
            for group, op, tensor in self._collectives_of(unit):
                launched.add(group.tune(op, tensor).transport != "windows")
                for windows in seconds:
                    seconds[windows] += group.tuned_s(op, tensor, windows=windows)
        self._is_launched = launched == {True} or (len(launched) > 1 and seconds[False] < seconds[True])
        for group in groups:
            group.restrict_gpus(windows=not self._is_launched)
        for unit in self.units:
            for group, op, tensor in self._collectives_of(unit):
                group.tune(op, tensor)  # ranks agree on calls that were to go over windows before

    # What differs between stages

    @abstractmethod
    def _shard_unit(self, unit: Unit) -> UnitState:
        """Broadcast a unit's parameters and allocate what this rank has of it."""

    @abstractmethod
    def _collectives_of(self, unit: Unit) -> Iterator[tuple[Group, CollectiveOp, torch.Tensor]]:
        """Yield the collectives of a unit in a step, each with its group and a tensor of the kind that it is for."""

    @abstractmethod
    def _shard_range(self, unit: Unit) -> range:
        """Return the elements of a unit whose gradient this rank sums."""

    @abstractmethod
    def _grad_view(self, param: UnitParam, flat: torch.Tensor) -> torch.Tensor:
        """Return a parameter's gradient in a buffer."""

    @abstractmethod
    def _reduce_unit(self, unit: Unit) -> None:
        """Start to reduce the gradients of a unit."""

    @abstractmethod
    def _shards_of(self, state: UnitState, param: UnitParam) -> Iterator[ParamShard]:
        """Yield what this rank steps of a parameter, if anything."""

    @abstractmethod
    def owned_range(self, unit: Unit) -> range:
        """Return the elements of a unit that this rank saves; where all ranks have all, an equal part."""

    @abstractmethod
    def full_params(self, unit: Unit) -> torch.Tensor:
        """Return all parameters of a unit in a new flat buffer."""

    @abstractmethod
    def owned_values(self, unit: Unit) -> torch.Tensor | None:
        """Return the flat parameters of `owned_range` where they are sharded, else None."""

    @abstractmethod
    def reload_params(self) -> None:
        """Gather full parameters, frozen ones too, after each rank has loaded its shard."""

    @abstractmethod
    def all_gather_params(self) -> None:
        """Let every rank see the parameters that the others have stepped."""

    @abstractmethod
    def check_params_in_place(self) -> None:
        """Raise `UserError` if a parameter was moved or cast since it was sharded."""

    def grads_scaled(self) -> None:  # noqa: B027 (stages differ)
        """Do nothing: every rank has scaled all that it reads."""

    def launch_order(self) -> str:
        """Return "": gradients are reduced in one order, and nothing else is launched."""
        return ""

    def adopt_launch_order(self, order: str) -> None:  # noqa: B027 (stages differ)
        """Do nothing: there is only one order."""

    def forward_passes(self) -> int:
        """Return 0: forward passes are not counted."""
        return 0

    def forward_without_data(self) -> None:  # noqa: B027 (stages differ)
        """Do nothing: a forward pass is not collective."""

    # A global batch

    def begin_micro_step(self, *, is_last: bool) -> None:
        """Begin a micro-step, and with the last one of this rank the reduction."""
        self._reducer = GradReducer(self.units, self._reduce_unit, overlaps=self.overlaps) if is_last else None

    def begin_backward(self, loss: torch.Tensor | None) -> None:  # noqa: B027 (stages differ)
        """Do nothing: parameters are always here."""

    def grad_ready(self, param: nn.Parameter) -> None:
        """Accumulate the gradient that a parameter has just got, and reduce its unit if that is complete."""
        unit, number = self._location[param]
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise UserError(
                f"{unit.params[number].names[0]} has a sparse gradient, which is not summed over ranks; "
                "use sparse=False"
            )
        self._accumulate(self.states[unit], unit.params[number], number)
        self.grad_skipped(param)

    def grad_skipped(self, param: nn.Parameter) -> None:
        """Reduce a parameter's unit if that is complete."""
        if self._reducer:
            self._reducer.grad_ready(self._location[param][0], param)

    def end_micro_step(self) -> None:
        """Reduce what the backward pass has left."""
        if self.overlaps:
            self._reduce_rest()

    def finish_reduction(self, micro_steps: int) -> None:
        """Take part in the reductions that this rank has no data for, and wait for all of them."""
        # What is not reduced during the backward pass waits until here: before it, others may need this rank's part
        # in what couples samples.
        self._reduce_rest()
        while self._reductions < self._reductions_due(micro_steps):
            self._run_without_data()
        for state in self.states.values():
            self._wait_for_reduction(state)

    def _reduce_rest(self) -> None:
        if self._reducer:
            self._reducer.finish()
            self._reducer, self._reductions = None, self._reductions + 1

    def _reductions_due(self, micro_steps: int) -> int:
        return micro_steps if self.reduces_every_micro_step else 1

    def _run_without_data(self) -> None:
        """Take part in one micro-step with zeros."""
        self.begin_micro_step(is_last=True)
        self.end_micro_step()
        self._reduce_rest()

    def _accumulate(self, state: UnitState, param: UnitParam, number: int) -> None:
        """Add a gradient to the buffer, the first by copying."""
        grad, view = param.parameter.grad, self._grad_view(param, state.grads)
        assert grad is not None
        if number in state.touched:
            view.add_(grad)
        else:
            view.copy_(grad)
            state.touched.add(number)
        param.parameter.grad = None

    def _zero_untouched(self, state: UnitState) -> None:
        """Zero what has no gradient on this rank, since it may have one on another."""
        for number, param in enumerate(state.unit.params):
            if number not in state.touched:
                param.view(state.grads).zero_()

    def _wait_for_reduction(self, state: UnitState) -> None:
        if state.work:
            self._timer.wait(state.work)
            state.work = None

    def clear(self) -> None:
        """Forget the gradients, so that the next global batch can begin."""
        for state in self.states.values():
            state.touched.clear()
            state.has_sums = False
        self._reductions = 0

    # What the optimizer sees

    def touched(self) -> list[int]:
        """Return the indices of the parameters that got a gradient on this rank."""
        return [state.unit.params[number].index for state in self.states.values() for number in sorted(state.touched)]

    def local_grads(self) -> list[torch.Tensor]:
        """Return the gradients whose sums this rank has, each element once."""
        return [state.grad_shard for unit, state in self.states.items() if unit.trainable]

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield what this rank steps of every trainable parameter; nothing for some."""
        for unit, state in self.states.items():
            for param in unit.params if unit.trainable else ():
                yield from self._shards_of(state, param)

    # A prepared model

    def register_hooks(self, model: nn.Module, on_grad: Callable[[nn.Parameter], None]) -> None:  # noqa: ARG002
        """Call `on_grad`, a method, with every parameter that has just got its gradient."""
        register_grad_hooks(self.units, on_grad)

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0."""
        for buffer in model.buffers():
            # As bytes: there are buffers of any type, complex ones too.
            contiguous = buffer.detach().contiguous()
            self.group.broadcast(contiguous.reshape(-1).view(torch.uint8))
            buffer.detach().copy_(contiguous)

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of the model's parameters and persistent buffers on the CPU."""
        return cpu_state_dict(model)

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that are allocated now, by kind."""
        return self.buffers.bytes

    def close(self) -> None:
        """Return what was allocated in the arena."""
        self._free_buffers()

    def _free_buffers(self) -> None:
        for state in self.states.values():
            for tensor in (state.full, state.grads):
                self.group.free(tensor)


def can_overlap(group: Group, units: Sequence[Unit]) -> bool:
    """Whether collectives can run during the backward pass without slowing it down: on a GPU, or with spare CPU cores.

    If each rank has one CPU core, a collective during the backward pass waits for a time slice on both sides at every
    synchronisation, which costs more than it hides.
    """
    if units[0].device.type != "cpu":
        return True
    places = group.endpoint.locations
    here = sum(places[rank].host == places[group.endpoint.rank].host for rank in group.members)
    return len(os.sched_getaffinity(0)) >= 2 * here
