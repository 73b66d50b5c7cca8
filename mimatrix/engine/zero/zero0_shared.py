"""Stage 0 among ranks of a host: gradients stay with the rank that summed them, and the others read them there.

Every rank needs all sums, but only to look at them once, in its optimizer. Where it sees its peers' memory it need not
copy them first, which is half of what an all-reduce moves. So each rank sums some parameters, whole ones, looks at the
others where they are, and nobody writes again before all have stepped.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch.optim import Optimizer

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.sharding import ParamShard, UnitState, Zero0, has_room
from mimatrix.engine.zero.units import Unit, UnitParam

_MOST = 1.15
"""Times the mean that a rank may have to sum: parameters stay whole, so parts are only nearly equal."""


class Zero0SharedGrads(Zero0):
    """Stage 0 without the second half of its all-reduce."""

    parts = True

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: StepTimer
    ) -> None:
        super().__init__(group, gathers, units, shares, watch)
        self.overlaps = False
        self._places = self._exchanged()
        self._being_read: Work | None = None

    def _part(self, unit: Unit) -> range:
        return _parts(unit, self.group.world_size)[self.group.rank]

    def _issue(self, unit: Unit) -> None:
        held = self.held[unit]
        self._blank(held)
        sizes = [len(part) for part in _parts(unit, self.group.world_size)]
        with self._watch.apart():
            held.work = self.group.reduce_scatter(held.grads, shares=Shares.of(sizes))

    def _take(self, held: UnitState, piece: UnitParam, number: int) -> None:
        self._until_read()
        super()._take(held, piece, number)

    def _blank(self, held: UnitState) -> None:
        self._until_read()
        super()._blank(held)

    def scaled(self) -> None:
        """Others read what this rank has scaled: not before it has."""
        with self._watch.apart():
            self.group.barrier()

    def publish(self) -> None:
        """All that this rank needs is read; its own part may still be read, until all say so."""
        self._being_read = self.group.start_barrier(wait=False)

    def _until_read(self) -> None:
        if self._being_read:
            self._watch.waits(self._being_read)
            self._being_read = None

    def _slice(self, held: UnitState, piece: UnitParam) -> Iterator[ParamShard]:
        parts = _parts(held.unit, self.group.world_size)
        inside = (member for member, part in enumerate(parts) if part.start <= piece.start < part.stop)
        owner = next(inside, self.group.rank)  # a parameter without elements may lie behind all of them
        whole = self._view(piece, held.grads)
        if owner != self.group.rank:
            at = self._places[owner][held.unit.index] + piece.start * held.grads.element_size()
            theirs = self.group.peer_tensor(owner, at, piece.shape.numel(), held.grads.dtype)
            whole = theirs.as_strided(piece.shape, piece.strides)
        yield ParamShard(piece, 0, piece.shape.numel(), piece.parameter, whole)

    def _exchanged(self) -> list[list[int]]:
        """Where in its arena each rank has the gradients of each unit."""
        table = torch.zeros(self.group.world_size, len(self.units), dtype=torch.int64)
        for unit, held in self.held.items():
            table[self.group.rank, unit.index] = self.group.arena_offset(held.grads) or 0
        self.group.all_gather(table.view(-1), shares=Shares.equal(self.group.world_size))
        places: list[list[int]] = table.tolist()
        return places


def reads_in_place(group: Group, units: Sequence[Unit], optimizer: Optimizer) -> bool:
    """Whether it can be done, and is worth it: the same answer on all ranks.

    Torch's own optimizers only look at gradients; others might change them, which their owner would not expect.
    """
    if has_room(group, units) or not group.maps_peers or not type(optimizer).__module__.startswith("torch.optim"):
        return False
    sums = [0] * group.world_size
    for unit in units:
        for member, part in enumerate(_parts(unit, group.world_size)):
            sums[member] += len(part) * unit.dtype.itemsize if unit.learns else 0
    return max(sums) <= _MOST * sum(sums) / group.world_size


def _parts(unit: Unit, ranks: int) -> list[range]:
    """For each rank whole parameters, as near to equal parts as they allow."""
    starts = [*(piece.start for piece in unit.pieces), unit.count]
    ends = [min(starts, key=lambda start: abs(start - unit.count * rank / ranks)) for rank in range(ranks)]
    return [range(start, stop) for start, stop in pairwise([0, *ends[1:], unit.count])]
