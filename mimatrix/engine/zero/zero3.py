"""Stage 3: parameters are cut too. They come for the time of use, unit by unit, and go again.

A pass over the model draws units in the order that all ranks keep (see `lines`); modules say when they run (see
`hooks`).
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.core.errors import UserError
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.ordering import ParamPrefetcher
from mimatrix.engine.zero.sharding import OUTSIDE, UnitState, Zero0, Zero1, Zero2, flatten
from mimatrix.engine.zero.units import Unit, UnitParam


class Zero3(Zero2):
    """Stage 3: a rank keeps its part of the parameters alone; the others' come for the time of use."""

    stage = 3

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: StepTimer
    ) -> None:
        self._pass: ParamPrefetcher | None = None
        self._micro = self._leaves = False
        self.passes = 0
        """How often the model ran, or would have with data."""
        self._left: dict[Unit, int] = {}
        self._works: dict[Unit, Work] = {}
        self._present: set[Unit] = set()
        self._ran: set[nn.Module] = set()
        self._uses = Counter[Unit]()
        """How many times modules of a frozen unit are still to come on the way back."""
        self._views: dict[Unit, list[torch.Tensor]] = {}
        self._blanks: dict[Unit, torch.Tensor] = {}
        self._by_storage: dict[int, Unit] = {}
        super().__init__(group, gathers, units, shares, watch)

    def _hold(self, unit: Unit) -> UnitState:
        part = self._part(unit)
        values = torch.empty(unit.count, dtype=unit.dtype, device=unit.device)
        flatten(unit, values)
        self.group.broadcast(values)
        owned = self.buffers.own(len(part), unit.dtype, unit.device, "parameters")
        owned.copy_(values[part.start : part.stop])
        self._views[unit] = [piece.of(values) for piece in unit.pieces]
        # Whoever looks at a parameter that is not here sees its shape, and no number.
        nothing = math.nan if unit.dtype.is_floating_point else 0
        self._blanks[unit] = torch.full((), nothing, dtype=unit.dtype, device=unit.device)
        self._by_storage[values.untyped_storage()._cdata] = unit
        self._by_storage[self._blanks[unit].untyped_storage()._cdata] = unit
        self._hide(unit)
        values.untyped_storage().resize_(0)
        grads = self._grads(unit, part)
        grads.zero_()
        return UnitState(unit, part, values, owned, grads)

    def __deepcopy__(self, memo: dict[int, object]) -> "Zero3":
        raise UserError(
            "in stage 3 a rank has only its part of the parameters, so the model cannot be copied; copy it before "
            "run.prepare, and load run.full_state_dict(model) into the copy"
        )

    def publish(self) -> None:
        """Nothing: they are gathered when they are needed."""

    # Passes over the model

    def begin(self, last: bool) -> None:
        """A micro-step begins: the next pass goes forward and back."""
        super().begin(last)
        self._micro = True

    def back(self) -> None:
        """The backward pass begins."""
        if self._pass:
            self._pass.goes_back = True

    def needed(self, unit: Unit) -> None:
        """Before a module of a unit runs: its parameters are here when this returns."""
        if self._pass is None:
            self._check_begun(unit)
            self._start_pass(looks=not self._micro)
        assert self._pass
        if unit not in self._present and unit not in self._works and not self._pass.draw(unit):
            if not self._pass.looks:
                raise UserError(
                    f"the module with {unit.name} runs twice in one pass, and stage 3 gathers its parameters once; "
                    "use stage 2, or run the model once for each micro-batch"
                )
            self._start_pass(looks=True)
            self._pass.draw(unit)
        if work := self._works.pop(unit, None):
            self._watch.waits(work)
            self._present.add(unit)
            self._show(unit)
        self._pass.ahead(unit)

    def needed_back(self, unit: Unit) -> None:
        """The same on the way back."""
        if self._pass is None or not self._pass.goes_back:
            raise UserError(OUTSIDE)
        self.needed(unit)

    def _check_begun(self, unit: Unit) -> None:
        if self._rounds and not self._micro:
            raise UserError(
                f"the module with {unit.name} runs after run.backward, inside of a global batch, where other ranks do "
                "not; in stage 3 run the model once for each micro-batch, or again when `not run.in_batch`"
            )

    def unit_of(self, tensor: torch.Tensor) -> Unit | None:
        """The unit that a tensor is a part of, if it is; refuses one whose values are not here."""
        storage = tensor.untyped_storage()._cdata
        unit = self._by_storage.get(storage)
        if unit is not None and storage == self._blanks[unit].untyped_storage()._cdata:
            shapes = {piece.names[0]: sorted(piece.shape) for piece in unit.pieces}
            name = next((name for name, shape in shapes.items() if shape == sorted(tensor.shape)), unit.name)
            raise UserError(
                f"{name} is used outside of its module, where stage 3 does not have it; use stage 2, or name the "
                "class of the module that uses it: run.prepare(..., whole=(TheClass,))"
            )
        return unit

    def used(self, unit: Unit, module: nn.Module) -> None:
        """A module of a unit has run forward."""
        assert self._pass
        self._ran.add(module)
        if self._pass.goes_back:
            return  # a checkpointed block that runs again
        self._left[unit] = self._left.get(unit, len(unit.modules)) - 1
        if self._left[unit] <= 0 and self._pass.frees(unit):
            self._free(unit)

    def comes_back(self, unit: Unit) -> bool:
        """A module of a frozen unit has run forward and will run back; False if that needs no counting."""
        if self._pass is None or self._pass.goes_back:
            return False
        self._uses[unit] += 1
        return True

    def came_back(self, unit: Unit) -> None:
        """It has: the unit goes after the last one. No gradient says so, as it does for units that learn."""
        self._uses[unit] -= 1
        if not self._uses[unit] and unit in self._present and not unit.keeps:
            self._free(unit)

    def _take(self, held: UnitState, piece: UnitParam, number: int) -> None:
        if self._ran.isdisjoint(piece.modules):
            raise UserError(
                f"{piece.names[0]} is used although its module does not run, so stage 3 cannot gather it in time; use "
                "stage 2, or name the class of the module that uses it: run.prepare(..., whole=(TheClass,))"
            )
        super()._take(held, piece, number)

    def finish(self) -> None:
        """The pass has ended: whatever this rank did not need, others may."""
        if self._micro and self._pass is None:
            self._start_pass(looks=False)
        # Others may need what is left of either line before they can go on with the other one.
        self._leaves = True
        gathers = Work(partial(self.leave, Work.wait), lambda: None)
        threading.Thread(target=gathers.run, daemon=True).start()
        super().finish()
        self._watch.waits(gathers)
        self._micro = self._leaves = False

    def leave(self, waits: Callable[[Work], None] | None = None) -> None:
        """End a pass: take part in what is left of it, then keep nothing."""
        waits = waits or self._watch.waits
        if self._pass is None:
            return
        for unit in [*self._works, *self._pass.rest()]:
            if unit not in self._works:
                self._gather(unit)
            waits(self._works.pop(unit))
            self._free(unit)
        for unit in list(self._present):
            self._free(unit)
        self._pass = None
        self._left.clear()
        self._uses.clear()
        self._ran.clear()

    def looked(self) -> None:
        """The model has run forward: if that was all, the pass has ended."""
        if self._pass and self._pass.looks:
            self.leave()

    def look_without_data(self) -> None:
        """Take part in one pass that only looks."""
        self._start_pass(looks=True)
        self.leave()

    def _start_pass(self, *, looks: bool) -> None:
        self.leave()
        self.passes += 1
        self._pass = ParamPrefetcher(self.units, self._gather, looks=looks)

    def _gather(self, unit: Unit) -> None:
        """Start gathering a unit into its memory."""
        if unit in self._works:
            self._watch.waits(self._works.pop(unit))
        held = self.held[unit]
        if unit not in self._present:
            self.buffers.count("units in flight", unit.bytes)
        held.values.untyped_storage().resize_(unit.bytes)
        held.values[held.part.start : held.part.stop].copy_(held.owned)
        self._works[unit] = self._gathers.all_gather(held.values, shares=self.shares, wait=False)

    def _show(self, unit: Unit) -> None:
        for piece, view in zip(unit.pieces, self._views[unit], strict=True):
            piece.parameter.data = view

    def _hide(self, unit: Unit) -> None:
        for piece in unit.pieces:
            piece.parameter.data = self._blanks[unit].expand(piece.shape)

    def _free(self, unit: Unit) -> None:
        if unit in self._present:
            self._hide(unit)
        self._present.discard(unit)
        self.held[unit].values.untyped_storage().resize_(0)
        self.buffers.count("units in flight", -unit.bytes)

    def _issue(self, unit: Unit) -> None:
        super()._issue(unit)
        if unit in self._present and not unit.keeps and not self._leaves:
            self._free(unit)

    def gathered(self, unit: Unit) -> torch.Tensor:
        """All parameters of a unit in a buffer of their own. A collective, in the order of units."""
        held = self.held[unit]
        values = torch.empty(unit.count, dtype=unit.dtype, device=unit.device)
        values[held.part.start : held.part.stop] = held.owned
        self._gathers.all_gather(values, shares=self.shares)
        return values


STAGES: tuple[type[Zero0], ...] = (Zero0, Zero1, Zero2, Zero3)
