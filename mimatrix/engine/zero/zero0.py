"""Stage 0: every rank has all parameters, gradients and optimizer state; gradients are all-reduced."""

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.group import Group
from mimatrix.engine.zero.base import DistributedStrategy
from mimatrix.engine.zero.strategy import ParamShard, UnitState
from mimatrix.engine.zero.units import Unit, UnitParam


class Zero0(DistributedStrategy):
    """ZeRO stage 0, plain data parallelism."""

    stage = 0
    grads_are_sharded = False

    def _shard_unit(self, unit: Unit) -> UnitState:
        """Leave the parameters where they are, and allocate a buffer in which their gradients are summed."""
        count = unit.count if unit.trainable else 0
        grads = self.buffers.collective(count, unit.dtype, unit.device, "gradients")
        grads.zero_()
        if count:
            # The buffer carries the parameters once, since broadcasting it is one call.
            for param in unit.params:
                param.strided_view(grads).copy_(param.parameter.detach())
            self.group.broadcast(grads)
            for param in unit.params:
                param.parameter.detach().copy_(param.strided_view(grads))
            grads.zero_()
        else:
            for param in unit.params:
                self.group.broadcast(param.parameter.detach())
        self.buffers.count("parameters", unit.bytes)
        empty = torch.empty(0, dtype=unit.dtype, device=unit.device)
        return UnitState(unit=unit, shard_range=self._shard_range(unit), full=empty, shard=empty, grads=grads)

    def _collectives_of(self, unit: Unit) -> Iterator[tuple[Group, CollectiveOp, torch.Tensor]]:
        if unit.trainable:
            yield self.group, CollectiveOp(Collective.ALL_REDUCE, unit.dtype), self.states[unit].grads

    def _shard_range(self, unit: Unit) -> range:
        return range(unit.count)

    def _grad_view(self, param: UnitParam, flat: torch.Tensor) -> torch.Tensor:
        # Parameters keep their strides, and so do their gradients.
        return param.strided_view(flat)

    def _reduce_unit(self, unit: Unit) -> None:
        state = self.states[unit]
        self._zero_untouched(state)
        with nullcontext() if self.overlaps else self._timer.exposed():
            state.work = self.group.all_reduce(state.grads, wait=not self.overlaps)

    def _shards_of(self, state: UnitState, param: UnitParam) -> Iterator[ParamShard]:
        # Full tensors in their shape: any optimizer does with them what it always does.
        grad = self._grad_view(param, state.grads)
        yield ParamShard(param=param, start=0, stop=param.shape.numel(), value=param.parameter, grad=grad)

    def owned_range(self, unit: Unit) -> range:
        """Return an equal part of a unit: every rank has the whole unit, and all save about equally many elements."""
        sizes = Shares.equal(self.group.world_size).cut(unit.count)
        return range(sum(sizes[: self.group.rank]), sum(sizes[: self.group.rank + 1]))

    def full_params(self, unit: Unit) -> torch.Tensor:
        """Return all parameters of a unit in a new flat buffer."""
        return unit.flatten()

    def owned_values(self, unit: Unit) -> torch.Tensor | None:  # noqa: ARG002 (nothing is sharded)
        """Return None: all ranks have all parameters."""
        return None

    def reload_params(self) -> None:
        """Do nothing: full parameters were loaded."""

    def all_gather_params(self) -> None:
        """Do nothing: every rank steps all parameters."""

    def check_params_in_place(self) -> None:
        """Do nothing: parameters may be moved."""
