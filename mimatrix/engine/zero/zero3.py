"""Stage 3: parameters are sharded too. They are all-gathered unit by unit for the time of use, then freed.

A pass over the model gathers units in the order that all ranks keep (see `ordering`); hooks on modules say when they
run (see `hooks`).
"""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from mimatrix.comm.control.user_calls import find_place
from mimatrix.comm.work import Work
from mimatrix.core.errors import UserError
from mimatrix.engine.user_calls import MODEL_IN_BATCH, MODEL_OUTSIDE
from mimatrix.engine.zero.base import ShardingContext
from mimatrix.engine.zero.buffers import IN_FLIGHT
from mimatrix.engine.zero.guarded_params import GuardedParams, ShardedParam
from mimatrix.engine.zero.hooks import register_module_hooks
from mimatrix.engine.zero.ordering import ParamPrefetcher
from mimatrix.engine.zero.strategy import GRAD_OUTSIDE_BACKWARD, UnitState
from mimatrix.engine.zero.units import Unit, UnitParam, persistent_buffers
from mimatrix.engine.zero.zero2 import Zero2


class Zero3(Zero2):
    """ZeRO stage 3: a rank keeps only its shard of the parameters; the rest is gathered for the time of use."""

    stage = 3
    counts_forward_passes = True

    def __init__(self, context: ShardingContext) -> None:
        super().__init__(context)
        self._pass: ParamPrefetcher | None = None
        self._pass_call = MODEL_OUTSIDE
        self._in_micro_step = self._is_ending_pass = self._has_checked_loss = False
        self._forward_passes = 0
        self._modules_left: dict[Unit, int] = {}
        """How many modules of a unit have not run forward yet."""
        self._unsharding: dict[Unit, Work] = {}
        """Units that are being gathered."""
        self._unsharded: set[Unit] = set()
        self._modules_run: set[nn.Module] = set()
        self._pending_backwards = Counter[Unit]()
        """How many modules of a frozen unit have their backward pass still to come."""
        self._full_views: dict[Unit, list[torch.Tensor]] = {}
        self._placeholders: dict[Unit, torch.Tensor] = {}
        self._guards: dict[Unit, GuardedParams] = {}
        self._unit_of_storage: dict[int, Unit] = {}
        self._launches: list[str] = []
        """What this micro-step has launched so far: `g` for a gather, `r` for a reduction."""
        self._own_order = self._adopted_order = ""

    def _shard_unit(self, unit: Unit) -> UnitState:
        shard_range = self._shard_range(unit)
        full = torch.empty(unit.count, dtype=unit.dtype, device=unit.device)
        unit.move_into(full)
        self.group.broadcast(full)
        shard = self.buffers.private(len(shard_range), unit.dtype, unit.device, "parameters")
        shard.copy_(full[shard_range.start : shard_range.stop])
        self._full_views[unit] = [param.view(full) for param in unit.params]
        # A parameter that is not unsharded shows its shape and NaN.
        value = math.nan if unit.dtype.is_floating_point else 0
        self._placeholders[unit] = torch.full((), value, dtype=unit.dtype, device=unit.device)
        self._unit_of_storage[full.untyped_storage()._cdata] = unit
        self._unit_of_storage[self._placeholders[unit].untyped_storage()._cdata] = unit
        names = [(param.names[0], param.parameter) for param in unit.params]
        self._guards[unit] = GuardedParams(names, ShardedParam)
        self._use_placeholders(unit)
        full.untyped_storage().resize_(0)
        grads = self._allocate_grads(unit, shard_range)
        grads.zero_()
        return UnitState(unit=unit, shard_range=shard_range, full=full, shard=shard, grads=grads)

    def register_hooks(self, model: nn.Module, on_grad: Callable[[nn.Parameter], None]) -> None:
        """Register `on_grad` on every gradient, and hooks on the modules that unshard their parameters."""
        super().register_hooks(model, on_grad)
        register_module_hooks(model, self)

    def all_gather_params(self) -> None:
        """Do nothing: parameters are gathered when they are needed."""

    def reload_params(self) -> None:
        """Do nothing: parameters are gathered when they are needed."""

    def check_params_in_place(self) -> None:
        """Do nothing: parameters have no place of their own between passes."""

    # Passes over the model

    def begin_micro_step(self, *, is_last: bool) -> None:
        """Begin a micro-step: the next pass runs forward and backward."""
        super().begin_micro_step(is_last=is_last)
        self._in_micro_step = True
        self._launches.clear()

    def begin_backward(self, loss: torch.Tensor | None) -> None:
        """Begin the backward pass, after a check that the first loss is not NaN."""
        self._check_first_loss(loss)
        if self._pass:
            self._pass.begin_backward()

    def _check_first_loss(self, loss: torch.Tensor | None) -> None:
        """Raise `UserError` if the first loss is NaN, as a placeholder is. Only once, since it waits for the GPU."""
        if loss is None or self._has_checked_loss:
            return
        if bool(loss.detach().isnan()):
            raise UserError(
                "the first loss is NaN; if it is not NaN in stage 2, a parameter is used outside its module: "
                "use stage 2, or name the class of the module that uses it: run.prepare(..., leaf_modules=(TheClass,))"
            )
        self._has_checked_loss = True

    def pre_forward(self, unit: Unit) -> None:
        """Wait until the parameters of a unit are unsharded, and start to unshard the next unit."""
        if self._pass is None:
            self._check_may_start(unit)
            self._start_pass(forward_only=not self._in_micro_step)
        assert self._pass
        is_here = unit in self._unsharded or unit in self._unsharding
        if not is_here and not self._pass.prefetch_through(unit):
            if not self._pass.forward_only:
                raise UserError(
                    f"the module with {unit.name} runs twice in one pass, and stage 3 gathers its parameters once; "
                    "use stage 2, or run the model once for each micro-batch"
                )
            self._start_pass(forward_only=True)
            self._pass.prefetch_through(unit)
        if work := self._unsharding.pop(unit, None):
            self._timer.wait(work)
            self._unsharded.add(unit)
            self._use_full_params(unit)
        self._pass.prefetch_after(unit)

    def pre_backward(self, unit: Unit) -> None:
        """Wait until the parameters of a unit are unsharded for the backward pass."""
        if self._pass is None or not self._pass.in_backward:
            raise UserError(GRAD_OUTSIDE_BACKWARD)
        self.pre_forward(unit)

    def _check_may_start(self, unit: Unit) -> None:
        if self._reductions and not self._in_micro_step:
            raise UserError(
                f"the module with {unit.name} runs after run.backward inside a global batch, where other ranks do "
                "not; in stage 3 run the model once for each micro-batch, or again when `not run.in_batch`"
            )

    def find_unit(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit whose memory a tensor views, if any; raise `UserError` for a placeholder."""
        storage = tensor.untyped_storage()._cdata
        unit = self._unit_of_storage.get(storage)
        if unit is not None and storage == self._placeholders[unit].untyped_storage()._cdata:
            shapes = {param.names[0]: sorted(param.shape) for param in unit.params}
            name = next((name for name, shape in shapes.items() if shape == sorted(tensor.shape)), unit.name)
            raise UserError(
                f"{name} is used outside its module, where stage 3 does not have it; use stage 2, or name the "
                "class of the module that uses it: run.prepare(..., leaf_modules=(TheClass,))"
            )
        return unit

    def post_forward(self, unit: Unit, module: nn.Module) -> None:
        """Note that a module has run, and reshard its unit after the last one."""
        assert self._pass
        self._modules_run.add(module)
        if self._pass.in_backward:
            return  # a checkpointed block is recomputed
        self._modules_left[unit] = self._modules_left.get(unit, len(unit.modules)) - 1
        if self._modules_left[unit] <= 0 and self._pass.reshards_after_forward(unit):
            self.reshard(unit)

    def expect_backward(self, unit: Unit) -> bool:
        """Count a module of a frozen unit whose backward pass is to come; return False in a backward pass."""
        if self._pass is None or self._pass.in_backward:
            return False
        self._pending_backwards[unit] += 1
        return True

    def post_backward(self, unit: Unit) -> None:
        """Reshard a frozen unit after its last module; trainable units are resharded with their gradients."""
        self._pending_backwards[unit] -= 1
        if not self._pending_backwards[unit] and unit in self._unsharded and not unit.shared:
            self.reshard(unit)

    def _accumulate(self, state: UnitState, param: UnitParam, number: int) -> None:
        if self._modules_run.isdisjoint(param.modules):
            raise UserError(
                f"{param.names[0]} is used although its module does not run, so stage 3 cannot gather it in time; use "
                "stage 2, or name the class of the module that uses it: run.prepare(..., leaf_modules=(TheClass,))"
            )
        super()._accumulate(state, param, number)

    def end_micro_step(self) -> None:
        """End the pass and join what other ranks still gather and reduce in it."""
        has_data = self._pass is not None
        if self._in_micro_step and not has_data:
            self._start_pass(forward_only=False)
        self._is_ending_pass = True
        if not self._is_launched:
            self._join_both_lines()
        elif has_data:
            self.end_pass()
            super().end_micro_step()
            self._own_order = "".join(self._launches)
        else:
            self._join_in_order()
        self._in_micro_step = self._is_ending_pass = False

    def _join_both_lines(self) -> None:
        """Join both sequences at once: others may need the rest of one before they can continue with the other."""
        watch = partial(self._gather_group.queue.watch, "a pass over the model")
        gathering = Work(partial(self.end_pass, lambda work: work.wait()), watch)
        threading.Thread(target=gathering.run, daemon=True).start()
        super().end_micro_step()
        self._timer.wait(gathering)

    def _join_in_order(self) -> None:
        """Join a micro-step without data: launch what ranks with data launch, in their order, and wait for nothing."""
        assert self._pass
        assert self._reducer
        rest = deque(self._pass.take_rest())
        # The first time the order is not known; any one works, since the two sequences have communicators of their own.
        order = self._adopted_order or self._own_order or "g" * len(self.units) + "gr" * len(self.units)
        for kind in order:
            if kind == "r":
                self._reducer.issue_next()
            elif rest:
                self._join_gather(rest.popleft(), self._timer.wait)
        for unit in rest:
            self._join_gather(unit, self._timer.wait)
        self.end_pass()
        super().end_micro_step()

    def _join_gather(self, unit: Unit, wait: Callable[[Work], None]) -> None:
        """Gather a unit for the others' sake, and free it."""
        if unit not in self._unsharding:
            self.unshard(unit)
        wait(self._unsharding.pop(unit))
        self.reshard(unit)

    def launch_order(self) -> str:
        """Return the order of gathers and reductions in this rank's last micro-step with data, over NCCL."""
        return self._own_order

    def adopt_launch_order(self, order: str) -> None:
        """Take part in that order in micro-steps for which this rank has no data."""
        self._adopted_order = order

    def end_pass(self, wait: Callable[[Work], None] | None = None) -> None:
        """End a pass: join what is left of it, and free all units."""
        wait = wait or self._timer.wait
        if self._pass is None:
            return
        for unit in [*self._unsharding, *self._pass.take_rest()]:
            self._join_gather(unit, wait)
        for unit in list(self._unsharded):
            self.reshard(unit)
        self._pass = None
        self._modules_left.clear()
        self._pending_backwards.clear()
        self._modules_run.clear()

    def end_forward_only(self) -> None:
        """End a pass that has no backward pass: the model has run."""
        if self._pass and self._pass.forward_only:
            self.end_pass()

    def forward_passes(self) -> int:
        """Return how many forward passes this rank has made or joined."""
        return self._forward_passes

    def forward_without_data(self) -> None:
        """Join one forward pass of the other ranks."""
        self._start_pass(forward_only=True)
        self.end_pass()

    def _start_pass(self, *, forward_only: bool) -> None:
        self.end_pass()
        self._forward_passes += 1
        self._pass_call = replace(MODEL_OUTSIDE if forward_only else MODEL_IN_BATCH, place=find_place())
        self._pass = ParamPrefetcher(self.units, self.unshard, forward_only=forward_only)

    def clear(self) -> None:
        """Forget the gradients, so that the next global batch can begin."""
        super().clear()
        self._in_micro_step = False

    # Units

    def unshard(self, unit: Unit) -> None:
        """Start to gather the full parameters of a unit."""
        if unit in self._unsharding:
            self._timer.wait(self._unsharding.pop(unit))
        state = self.states[unit]
        self._launches.append("g")
        if unit not in self._unsharded:
            self.buffers.count(IN_FLIGHT, unit.bytes)
        state.full.untyped_storage().resize_(unit.bytes)
        state.full[state.shard_range.start : state.shard_range.stop].copy_(state.shard)
        with self._gather_group.caller.calling(self._pass_call):
            self._unsharding[unit] = self._gather_group.all_gather(state.full, shares=self.shares, wait=False)

    def reshard(self, unit: Unit) -> None:
        """Free the full parameters of a unit."""
        if unit in self._unsharded:
            self._use_placeholders(unit)
        self._unsharded.discard(unit)
        self.states[unit].full.untyped_storage().resize_(0)
        self.buffers.count(IN_FLIGHT, -unit.bytes)

    def _use_full_params(self, unit: Unit) -> None:
        self._guards[unit].release()
        for param, view in zip(unit.params, self._full_views[unit], strict=True):
            param.parameter.data = view

    def _use_placeholders(self, unit: Unit) -> None:
        for param in unit.params:
            param.parameter.data = self._placeholders[unit].expand(param.shape)
        self._guards[unit].guard()

    def _reduce_unit(self, unit: Unit) -> None:
        self._launches.append("r")
        super()._reduce_unit(unit)
        if unit in self._unsharded and not unit.shared and not self._is_ending_pass:
            self.reshard(unit)

    # All parameters

    def full_params(self, unit: Unit) -> torch.Tensor:
        """Gather all parameters of a unit into a new flat buffer. A collective, in the order of units."""
        state = self.states[unit]
        full = torch.empty(unit.count, dtype=unit.dtype, device=unit.device)
        full[state.shard_range.start : state.shard_range.stop] = state.shard
        self._gather_group.all_gather(full, shares=self.shares)
        return full

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Gather the parameters unit by unit, and copy them and the persistent buffers to the CPU. A collective."""
        state_dict: dict[str, torch.Tensor] = {}
        for unit in self.units:
            full = self.full_params(unit)
            for param in unit.params:
                state_dict |= dict.fromkeys(param.names, param.view(full).cpu().clone())
        return state_dict | {name: value.detach().cpu().clone() for name, value in persistent_buffers(model).items()}

    def close(self) -> None:
        """Return what was allocated in the arena."""
        for guard in self._guards.values():
            guard.release()
        self._free_buffers()
