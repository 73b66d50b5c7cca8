"""Stage 0 among the ranks of one host: gradients stay with the rank that summed them, and the others read them there.

Every rank needs all sums, but only to read them once, in its optimizer. A rank that sees the memory of its peers need
not copy them first, which is half of what an all-reduce moves. So each rank sums some parameters, reads the others
where they are, and no rank writes again before all have stepped.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch.optim import Optimizer

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.engine.zero.base import ShardingContext, can_overlap
from mimatrix.engine.zero.strategy import ParamShard, UnitState
from mimatrix.engine.zero.units import Unit, UnitParam
from mimatrix.engine.zero.zero0 import Zero0

_MAX_IMBALANCE = 1.15
"""Times the mean that a rank may have to sum: parameters are not split, so parts are only nearly equal."""


class Zero0SharedGrads(Zero0):
    """ZeRO stage 0 without the second half of its all-reduce: ranks read each other's sums in place."""

    grads_are_sharded = True

    def __init__(self, context: ShardingContext) -> None:
        super().__init__(context)
        self.overlaps = False
        self._grad_offsets: list[list[int]] = []
        """Where in its arena each rank has the gradients of each unit."""
        self._peers_reading: Work | None = None

    def shard(self) -> None:
        """Broadcast the parameters, allocate the gradients and tell the peers where they are. A collective."""
        super().shard()
        table = torch.zeros(self.group.world_size, len(self.units), dtype=torch.int64)
        for unit, state in self.states.items():
            table[self.group.rank, unit.index] = self.group.arena_offset(state.grads) or 0
        self.group.all_gather(table.view(-1), shares=Shares.equal(self.group.world_size))
        self._grad_offsets = table.tolist()

    def _shard_range(self, unit: Unit) -> range:
        return _split_params(unit, self.group.world_size)[self.group.rank]

    def _reduce_unit(self, unit: Unit) -> None:
        state = self.states[unit]
        self._zero_untouched(state)
        sizes = [len(part) for part in _split_params(unit, self.group.world_size)]
        with self._timer.exposed():
            state.work = self.group.reduce_scatter(state.grads, shares=Shares.of(sizes))

    def _accumulate(self, state: UnitState, param: UnitParam, number: int) -> None:
        self._wait_for_readers()
        super()._accumulate(state, param, number)

    def _zero_untouched(self, state: UnitState) -> None:
        self._wait_for_readers()
        super()._zero_untouched(state)

    def grads_scaled(self) -> None:
        """Wait until all ranks have scaled their sums, since the others read them."""
        with self._timer.exposed():
            self.group.barrier()

    def all_gather_params(self) -> None:
        """Note that this rank has read what it needs; its own sums may be read until all ranks say so."""
        self._peers_reading = self.group.start_barrier(wait=False)

    def _wait_for_readers(self) -> None:
        if self._peers_reading:
            self._timer.wait(self._peers_reading)
            self._peers_reading = None

    def _shards_of(self, state: UnitState, param: UnitParam) -> Iterator[ParamShard]:
        parts = _split_params(state.unit, self.group.world_size)
        owners = (rank for rank, part in enumerate(parts) if part.start <= param.start < part.stop)
        owner = next(owners, self.group.rank)  # a parameter without elements may lie behind all parts
        grad = self._grad_view(param, state.grads)
        if owner != self.group.rank:
            offset = self._grad_offsets[owner][state.unit.index] + param.start * state.grads.element_size()
            flat = self.group.peer_tensor(owner, offset, param.shape.numel(), state.grads.dtype)
            grad = flat.as_strided(param.shape, param.strides)
        yield ParamShard(param=param, start=0, stop=param.shape.numel(), value=param.parameter, grad=grad)


def can_share_grads(group: Group, units: Sequence[Unit], optimizer: Optimizer) -> bool:
    """Whether reading gradients in place is possible and worth it: the same answer on all ranks.

    Torch's own optimizers only read gradients. Others might change them, which would harm the rank that owns them.
    """
    if can_overlap(group, units) or not group.maps_peers or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    rank_bytes = [0] * group.world_size
    for unit in units:
        for rank, part in enumerate(_split_params(unit, group.world_size)):
            rank_bytes[rank] += len(part) * unit.dtype.itemsize if unit.trainable else 0
    return max(rank_bytes) <= _MAX_IMBALANCE * sum(rank_bytes) / group.world_size


def _split_params(unit: Unit, ranks: int) -> list[range]:
    """Split a unit between parameters into one part for each rank, as near to equal as that allows."""
    starts = [*(param.start for param in unit.params), unit.count]
    ends = [min(starts, key=lambda start: abs(start - unit.count * rank / ranks)) for rank in range(ranks)]
    return [range(start, stop) for start, stop in pairwise([0, *ends[1:], unit.count])]
