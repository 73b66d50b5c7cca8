"""Stage 2: gradients are sharded too. Each micro-step's gradients are reduce-scattered, unit by unit."""

from collections import deque

import torch

from mimatrix.comm.work import Work
from mimatrix.engine.zero.base import ShardingContext
from mimatrix.engine.zero.buffers import IN_FLIGHT
from mimatrix.engine.zero.strategy import UnitState
from mimatrix.engine.zero.units import Unit, UnitParam
from mimatrix.engine.zero.zero1 import Zero1

_MAX_IN_FLIGHT = 2
"""Units whose gradients are reduced at the same time; more would only take memory."""


class Zero2(Zero1):
    """ZeRO stage 2: gradients are reduced in every micro-step, and a rank keeps only the sums of its shard."""

    stage = 2
    reduces_every_micro_step = True

    def __init__(self, context: ShardingContext) -> None:
        super().__init__(context)
        self._in_flight: deque[tuple[UnitState, torch.Tensor, Work]] = deque()
        self.overlaps = True  # or the gradients of all units would be in memory at once

    def _allocate_grads(self, unit: Unit, shard_range: range) -> torch.Tensor:
        return self.buffers.private(len(shard_range) if unit.trainable else 0, unit.dtype, unit.device, "gradients")

    def _take_reduced(self, unit: Unit) -> torch.Tensor:
        return self.buffers.collective(unit.count, unit.dtype, unit.device, IN_FLIGHT)

    def _drop_reduced(self, grads: torch.Tensor) -> None:
        self.buffers.free(grads, IN_FLIGHT)

    def begin_micro_step(self, *, is_last: bool) -> None:  # noqa: ARG002 (every micro-step is reduced)
        """Begin a micro-step and its reduction."""
        super().begin_micro_step(is_last=True)

    def _accumulate(self, state: UnitState, param: UnitParam, number: int) -> None:  # noqa: ARG002
        """Leave a gradient where it is until its unit is reduced."""
        state.touched.add(number)

    def _reduce_unit(self, unit: Unit) -> None:
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._add_oldest_sums()
        flat = self.buffers.collective(unit.count, unit.dtype, unit.device, IN_FLIGHT)
        unit.zero_gaps(flat)
        for param in unit.params:
            grad, view = param.parameter.grad, param.view(flat)
            view.zero_() if grad is None else view.copy_(grad)
            param.parameter.grad = None
        work = self.group.reduce_scatter(flat, shares=self.shares, wait=False)
        self._in_flight.append((self.states[unit], flat, work))

    def finish_reduction(self, micro_steps: int) -> None:
        """Take part in the reductions that this rank has no data for, and wait for all of them."""
        super().finish_reduction(micro_steps)
        while self._in_flight:
            self._add_oldest_sums()

    def _add_oldest_sums(self) -> None:
        """Wait for the oldest reduction and add this rank's part of it to its sums."""
        state, flat, work = self._in_flight.popleft()
        self._timer.wait(work)
        sums = flat[state.shard_range.start : state.shard_range.stop]
        state.grads.add_(sums) if state.has_sums else state.grads.copy_(sums)
        state.has_sums = True
        self.buffers.free(flat, IN_FLIGHT)
