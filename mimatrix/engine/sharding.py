"""What is cut over the ranks in each ZeRO stage, and what moves when.

    stage  cut                    moves
    0      nothing                gradients are all-reduced once in a global batch, by unit, beside the backward pass
    1      optimizer state        the same as a reduce-scatter; then the parameters are gathered
    2      + gradients            gradients are reduce-scattered in every micro-step; then as 1
    3      + parameters           parameters are gathered unit by unit before use and freed after it; gradients as 2

All of it in an order that is fixed here, so that a rank without data can take part with zeros (see `lines`).
"""

import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.core.errors import UserError
from mimatrix.engine.buffers import Buffers
from mimatrix.engine.lines import Gathering, Reduction
from mimatrix.engine.stats import Watch
from mimatrix.engine.units import Piece, Unit

OUTSIDE = "gradients came outside of run.backward; call run.backward(loss) instead of loss.backward()"
_IN_FLIGHT = 2
"""Units whose gradients are on their way at the same time; more would only take memory."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What this rank owns of a parameter: elements [start, stop) of it, flat, and their gradient."""

    piece: Piece
    start: int
    stop: int
    value: torch.Tensor
    grad: torch.Tensor


@dataclass(slots=True, eq=False)
class Held:
    """What a rank holds of a unit."""

    unit: Unit
    part: range
    """The elements that it owns."""
    values: torch.Tensor
    """Parameters: all of them (stages 0 to 2; in stage 3 with or without memory behind them)."""
    owned: torch.Tensor
    """Parameters: its part."""
    grads: torch.Tensor
    """Gradients: all (stages 0, 1), or its part."""
    touched: set[int] = field(default_factory=set)
    """Pieces that got a gradient in this global batch."""
    summed: bool = False
    """Whether its part of `grads` has something of this global batch already (stages 2, 3)."""
    work: Work | None = None

    @property
    def own_grads(self) -> torch.Tensor:
        """The gradient of what it owns."""
        whole = self.grads.numel() == self.unit.count
        return self.grads[self.part.start : self.part.stop] if whole else self.grads


class Sharding:
    """Stage 0, and what all stages have in common."""

    stage = 0

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: Watch
    ) -> None:
        self.group, self._gathers, self.units, self.shares = group, gathers or group, units, shares
        self.buffers, self._watch = Buffers(group), watch
        self.held = {unit: self._hold(unit) for unit in units}
        self._of = {
            piece.parameter: (unit, number) for unit in units for number, piece in enumerate(unit.pieces) if unit.learns
        }
        self._reduction: Reduction | None = None
        self._rounds = 0
        self.overlaps = _has_room(group, units)
        """Whether gradients are reduced beside the backward pass, or after it."""

    # What a stage does differently

    def _part(self, unit: Unit) -> range:
        return range(unit.count)

    def _hold(self, unit: Unit) -> Held:
        """Parameters stay where they are; their gradients are summed in a buffer."""
        count = unit.count if unit.learns else 0
        grads = self.buffers.shared(count, unit.dtype, unit.device, "gradients")
        grads.zero_()
        if count:
            for piece in unit.pieces:
                piece.of(grads).copy_(piece.parameter.detach())
            self.group.broadcast(grads)
            for piece in unit.pieces:
                piece.parameter.detach().copy_(piece.of(grads))
            grads.zero_()
        else:
            for piece in unit.pieces:
                self.group.broadcast(piece.parameter.detach())
        self.buffers.count("parameters", unit.bytes)
        nothing = torch.empty(0, dtype=unit.dtype, device=unit.device)
        return Held(unit, self._part(unit), nothing, nothing, grads)

    def _issue(self, unit: Unit) -> None:
        held = self.held[unit]
        self._blank(held)
        held.work = self._reduced(held.grads)

    def _reduced(self, grads: torch.Tensor) -> Work:
        return self.group.all_reduce(grads, wait=False)

    def publish(self) -> None:
        """Every rank has stepped: let all see the new parameters. A collective."""

    # A micro-step

    def begin(self, last: bool) -> None:
        """A micro-step begins; `last`: this rank has no further one in this global batch."""
        self._reduction = Reduction(self.units, self._issue, overlaps=self.overlaps) if last else None

    def arrived(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient."""
        unit, number = self._of[parameter]
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise UserError(
                f"{unit.pieces[number].names[0]} has a sparse gradient, which is not summed over ranks; "
                "use sparse=False"
            )
        self._take(self.held[unit], unit.pieces[number], number)
        self.passed(parameter)

    def passed(self, parameter: nn.Parameter) -> None:
        """No more will come for a parameter in this micro-step."""
        if self._reduction:
            self._reduction.arrived(self._of[parameter][0], parameter)

    def finish(self) -> None:
        """The backward pass has ended."""
        if self._reduction:
            self._reduction.finish()
            self._reduction, self._rounds = None, self._rounds + 1

    def end(self, rounds: int) -> None:
        """The global batch ends, with so many micro-steps on the rank that has most: all gradients are reduced."""
        while self._rounds < self._wanted(rounds):
            self.absent()
        for held in self.held.values():
            self._settle(held)

    def _wanted(self, rounds: int) -> int:  # noqa: ARG002 (stages differ)
        return 1

    def absent(self) -> None:
        """Take part in one micro-step without data."""
        self.begin(last=True)
        self.finish()

    def clear(self) -> None:
        """Gradients are gone: the next global batch begins."""
        for held in self.held.values():
            held.touched.clear()
            held.summed = False
        self._rounds = 0

    def _take(self, held: Held, piece: Piece, number: int) -> None:
        """Add a gradient to the buffer, the first by copying."""
        gradient, view = piece.parameter.grad, piece.of(held.grads)
        assert gradient is not None
        if number in held.touched:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            held.touched.add(number)
        piece.parameter.grad = None

    def _blank(self, held: Held) -> None:
        """What has no gradient on this rank may have one on another."""
        for number, piece in enumerate(held.unit.pieces):
            if number not in held.touched:
                piece.of(held.grads).zero_()

    def _settle(self, held: Held) -> None:
        if held.work:
            self._watch.waits(held.work)
            held.work = None

    def close(self) -> None:
        """Give the arena back what it lent."""
        for unit, held in self.held.items():
            for piece in unit.pieces if self.stage in (1, 2) else ():
                piece.parameter.data = piece.parameter.detach().clone()
            for tensor in (held.values, held.grads):
                self.group.free(tensor)

    # What the optimizer sees

    def touched(self) -> list[int]:
        """The numbers of parameters that got a gradient on this rank."""
        return [held.unit.pieces[number].index for held in self.held.values() for number in sorted(held.touched)]

    def gradients(self) -> list[torch.Tensor]:
        """All that this rank owns, each element once."""
        return [held.own_grads for unit, held in self.held.items() if unit.learns]

    def slices(self) -> Iterator[Slice]:
        """What this rank owns of every parameter that learns; nothing of some."""
        for unit, held in self.held.items():
            for piece in unit.pieces if unit.learns else ():
                yield from self._slice(held, piece)

    def _slice(self, held: Held, piece: Piece) -> Iterator[Slice]:
        # Whole tensors in their shape: any optimizer does with them what it always does.
        yield Slice(piece, 0, piece.shape.numel(), piece.parameter, piece.of(held.grads))


class OptimizerCut(Sharding):
    """Stage 1: a rank steps its part of every unit; full parameters and gradients lie flat in the arena."""

    stage = 1

    def _part(self, unit: Unit) -> range:
        sizes = self.shares.cut(unit.count)
        return range(sum(sizes[: self.group.me]), sum(sizes[: self.group.me + 1]))

    def _hold(self, unit: Unit) -> Held:
        part, values = self._part(unit), self._flat_values(unit)
        grads = self._grads(unit, part)
        grads.zero_()
        return Held(unit, part, values, values[part.start : part.stop], grads)

    def _flat_values(self, unit: Unit) -> torch.Tensor:
        """The parameters, moved into one buffer; the same on all ranks."""
        values = self.buffers.shared(unit.count, unit.dtype, unit.device, "parameters")
        _flatten(unit, values)
        self.group.broadcast(values)
        return values

    def _grads(self, unit: Unit, part: range) -> torch.Tensor:  # noqa: ARG002 (stages differ)
        return self.buffers.shared(unit.count if unit.learns else 0, unit.dtype, unit.device, "gradients")

    def _reduced(self, grads: torch.Tensor) -> Work:
        return self.group.reduce_scatter(grads, shares=self.shares, wait=False)

    def publish(self) -> None:
        """Gather what the others have stepped."""
        learning = [held.values for unit, held in self.held.items() if unit.learns]
        for work in [self.group.all_gather(values, shares=self.shares, wait=False) for values in learning]:
            self._watch.waits(work)

    def _slice(self, held: Held, piece: Piece) -> Iterator[Slice]:
        start, stop = max(piece.start, held.part.start), min(piece.stop, held.part.stop)
        if start < stop:
            inside = slice(start - held.part.start, stop - held.part.start)
            grad = held.own_grads[inside]
            yield Slice(piece, start - piece.start, stop - piece.start, held.owned[inside], grad)


class GradientsCut(OptimizerCut):
    """Stage 2: gradients are reduced in every micro-step, and a rank keeps the sum of its part alone."""

    stage = 2

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: Watch
    ) -> None:
        self._flying: deque[tuple[Held, torch.Tensor, Work]] = deque()
        super().__init__(group, gathers, units, shares, watch)
        self.overlaps = True  # or the gradients of all units would lie here at once

    def _grads(self, unit: Unit, part: range) -> torch.Tensor:
        return self.buffers.own(len(part) if unit.learns else 0, unit.dtype, unit.device, "gradients")

    def begin(self, last: bool) -> None:  # noqa: ARG002 (every micro-step is reduced)
        """A micro-step begins."""
        super().begin(last=True)

    def _wanted(self, rounds: int) -> int:
        return rounds

    def _take(self, held: Held, piece: Piece, number: int) -> None:  # noqa: ARG002
        """It stays where it is until its whole unit goes."""
        held.touched.add(number)

    def _issue(self, unit: Unit) -> None:
        while len(self._flying) >= _IN_FLIGHT:
            self._land()
        held = self.held[unit]
        flat = self.buffers.shared(unit.count, unit.dtype, unit.device, "units in flight")
        unit.zero_gaps(flat)
        for piece in unit.pieces:
            gradient, view = piece.parameter.grad, piece.of(flat)
            view.zero_() if gradient is None else view.copy_(gradient)
            piece.parameter.grad = None
        self._flying.append((held, flat, self._reduced(flat)))

    def end(self, rounds: int) -> None:
        """The global batch ends."""
        super().end(rounds)
        while self._flying:
            self._land()

    def _land(self) -> None:
        """The oldest reduction: add its result to the sums."""
        held, flat, work = self._flying.popleft()
        self._watch.waits(work)
        mine = flat[held.part.start : held.part.stop]
        held.grads.add_(mine) if held.summed else held.grads.copy_(mine)
        held.summed = True
        self.buffers.free(flat, "units in flight")


class ParametersCut(GradientsCut):
    """Stage 3: a rank keeps its part of the parameters alone; the others' come for the time of use."""

    stage = 3

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: Watch
    ) -> None:
        self._pass: Gathering | None = None
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

    def _hold(self, unit: Unit) -> Held:
        part = self._part(unit)
        values = torch.empty(unit.count, dtype=unit.dtype, device=unit.device)
        _flatten(unit, values)
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
        return Held(unit, part, values, owned, grads)

    def __deepcopy__(self, memo: dict[int, object]) -> "ParametersCut":
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

    def _take(self, held: Held, piece: Piece, number: int) -> None:
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
        self._pass = Gathering(self.units, self._gather, looks=looks)

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


STAGES: tuple[type[Sharding], ...] = (Sharding, OptimizerCut, GradientsCut, ParametersCut)


def _has_room(group: Group, units: Sequence[Unit]) -> bool:
    """Whether anything computes beside collectives without taking turns with them: a GPU, or a spare processor.

    Where ranks have one processor each, a collective beside the backward pass waits for a turn on both sides at every
    synchronisation, which costs more than it hides.
    """
    if units[0].device.type != "cpu":
        return True
    places = group.endpoint.places
    here = sum(places[rank].host == places[group.endpoint.rank].host for rank in group.members)
    return len(os.sched_getaffinity(0)) >= 2 * here


def _flatten(unit: Unit, values: torch.Tensor) -> None:
    """Move a unit's parameters into one buffer; they stay the same objects."""
    values.zero_()
    for piece in unit.pieces:
        place = piece.of(values)
        place.copy_(piece.parameter.detach())
        piece.parameter.data = place
