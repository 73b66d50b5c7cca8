"""Stage 1: the optimizer's state is sharded. Gradients are reduce-scattered, parameters all-gathered after the step."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import nn

from mimatrix.collectives.schedule import Collective
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.zero.base import DistributedStrategy
from mimatrix.engine.zero.hooks import register_state_dict_copies
from mimatrix.engine.zero.strategy import ParamShard, UnitState
from mimatrix.engine.zero.units import Unit, UnitParam


class Zero1(DistributedStrategy):
    """ZeRO stage 1: a rank steps its shard of every unit; full parameters and gradients lie flat in the arena."""

    stage = 1
    grads_are_sharded = True
    is_sharded = True

    def _shard_unit(self, unit: Unit) -> UnitState:
        shard_range = self._shard_range(unit)
        full = self.buffers.collective(unit.count, unit.dtype, unit.device, "parameters")
        unit.move_into(full)
        self.group.broadcast(full)
        grads = self._allocate_grads(unit, shard_range)
        grads.zero_()
        shard = full[shard_range.start : shard_range.stop]
        return UnitState(unit=unit, shard_range=shard_range, full=full, shard=shard, grads=grads)

    def _allocate_grads(self, unit: Unit, shard_range: range) -> torch.Tensor:  # noqa: ARG002 (stages differ)
        return self.buffers.collective(unit.count if unit.trainable else 0, unit.dtype, unit.device, "gradients")

    def _collectives_of(self, unit: Unit) -> Iterator[tuple[Group, CollectiveOp, torch.Tensor]]:
        state = self.states[unit]
        if unit.trainable:
            grads = self._take_reduced(unit)
            yield self.group, CollectiveOp(Collective.REDUCE_SCATTER, unit.dtype, shares=self.shares), grads
            self._drop_reduced(grads)
        yield self._gather_group, CollectiveOp(Collective.ALL_GATHER, unit.dtype, shares=self.shares), state.full

    def _take_reduced(self, unit: Unit) -> torch.Tensor:
        """Return the buffer in which a unit's gradients are reduced, or one of its kind."""
        return self.states[unit].grads

    def _drop_reduced(self, grads: torch.Tensor) -> None:
        """Do nothing: the buffer stays."""

    def _shard_range(self, unit: Unit) -> range:
        sizes = self.shares.cut(unit.count)
        return range(sum(sizes[: self.group.rank]), sum(sizes[: self.group.rank + 1]))

    def _grad_view(self, param: UnitParam, flat: torch.Tensor) -> torch.Tensor:
        # Row by row, so that a shard has the same elements whatever the strides: checkpoints rely on that.
        return param.view(flat)

    def _reduce_unit(self, unit: Unit) -> None:
        state = self.states[unit]
        self._zero_untouched(state)
        with nullcontext() if self.overlaps else self._timer.exposed():
            state.work = self.group.reduce_scatter(state.grads, shares=self.shares, wait=not self.overlaps)

    def _shards_of(self, state: UnitState, param: UnitParam) -> Iterator[ParamShard]:
        offset = state.shard_range.start
        start, stop = max(param.start, offset), min(param.stop, state.shard_range.stop)
        if start < stop:
            inside = slice(start - offset, stop - offset)
            yield ParamShard(
                param=param,
                start=start - param.start,
                stop=stop - param.start,
                value=state.shard[inside],
                grad=state.grad_shard[inside],
            )

    def register_hooks(self, model: nn.Module, on_grad: Callable[[nn.Parameter], None]) -> None:
        """Register `on_grad` on every gradient, and copies of what `state_dict` returns."""
        super().register_hooks(model, on_grad)
        register_state_dict_copies(model)

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Gather what the other ranks have stepped."""
        full = [state.full for unit, state in self.states.items() if unit.trainable]
        for work in [self.group.all_gather(params, shares=self.shares, wait=False) for params in full]:
            self._timer.wait(work)

    def reload_params(self) -> None:
        """Gather the shards that the other ranks have loaded, of frozen units too."""
        for state in self.states.values():
            self.group.all_gather(state.full, shares=self.shares)

    def owned_range(self, unit: Unit) -> range:
        """Return the elements of a unit that this rank steps and saves."""
        return self.states[unit].shard_range

    def owned_values(self, unit: Unit) -> torch.Tensor | None:
        """Return the flat parameters of `owned_range`."""
        return self.states[unit].shard

    def full_params(self, unit: Unit) -> torch.Tensor:
        """Return all parameters of a unit in a new flat buffer."""
        return self.states[unit].full.clone()

    def check_params_in_place(self) -> None:
        """Raise `UserError` if a parameter is no longer a view of its unit's buffer."""
        for unit, state in self.states.items():
            for param in unit.params:
                if param.shape.numel() and param.parameter.data_ptr() != param.view(state.full).data_ptr():
                    raise UserError(
                        f"{param.names[0]} was moved or cast after run.prepare, so what is trained is another tensor; "
                        "move and cast the model before run.prepare"
                    )

    def close(self) -> None:
        """Return what was allocated in the arena; parameters get memory of their own first."""
        for unit in self.units:
            for param in unit.params:
                param.parameter.data = param.parameter.detach().clone()
        self._free_buffers()
