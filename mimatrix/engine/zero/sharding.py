"""What is cut over the ranks in each ZeRO stage, and what moves when.

    stage  cut                    moves
    0      nothing                gradients are all-reduced once in a global batch, by unit, beside the backward pass
    1      optimizer state        the same as a reduce-scatter; then the parameters are gathered
    2      + gradients            gradients are reduce-scattered in every micro-step; then as 1
    3      + parameters           parameters are gathered unit by unit before use and freed after it; gradients as 2

All of it in an order that is fixed here, so that a rank without data can take part with zeros (see `lines`).
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.comm.memory.arena import slot_bytes
from mimatrix.comm.work import Work
from mimatrix.core.errors import UserError
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.buffers import IN_FLIGHT, Buffers
from mimatrix.engine.zero.ordering import GradReducer
from mimatrix.engine.zero.units import Unit, UnitParam

OUTSIDE = "gradients came outside of run.backward; call run.backward(loss) instead of loss.backward()"
_IN_FLIGHT = 2
"""Units whose gradients are on their way at the same time; more would only take memory."""


@dataclass(frozen=True, slots=True)
class ParamShard:
    """What this rank owns of a parameter: elements [start, stop) of it, flat, and their gradient."""

    piece: UnitParam
    start: int
    stop: int
    value: torch.Tensor
    grad: torch.Tensor


@dataclass(slots=True, eq=False)
class UnitState:
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


class Zero0:
    """Stage 0, and what all stages have in common."""

    stage = 0
    parts = False
    """Whether each rank has the sums of another part of the gradients, or all have all."""

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: StepTimer
    ) -> None:
        self.group, self._gathers, self.units, self.shares = group, gathers or group, units, shares
        model_bytes = sum(slot_bytes(unit.bytes) for unit in units)
        self.buffers, self._watch = Buffers(group, units[0].device, model_bytes, {self._gathers} - {group}), watch
        self.held = {unit: self._hold(unit) for unit in units}
        self._of = {
            piece.parameter: (unit, number) for unit in units for number, piece in enumerate(unit.pieces) if unit.learns
        }
        self._reduction: GradReducer | None = None
        self._rounds = 0
        self.overlaps = has_room(group, units)
        """Whether gradients are reduced beside the backward pass, or after it."""

    # What a stage does differently

    def _part(self, unit: Unit) -> range:
        return range(unit.count)

    def _view(self, piece: UnitParam, flat: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient in a buffer. Parameters stay as they are laid out, so gradients are too."""
        return piece.laid(flat)

    def _hold(self, unit: Unit) -> UnitState:
        """Parameters stay where they are; their gradients are summed in a buffer."""
        count = unit.count if unit.learns else 0
        grads = self.buffers.shared(count, unit.dtype, unit.device, "gradients")
        grads.zero_()
        if count:
            for piece in unit.pieces:
                piece.laid(grads).copy_(piece.parameter.detach())
            self.group.broadcast(grads)
            for piece in unit.pieces:
                piece.parameter.detach().copy_(piece.laid(grads))
            grads.zero_()
        else:
            for piece in unit.pieces:
                self.group.broadcast(piece.parameter.detach())
        self.buffers.count("parameters", unit.bytes)
        nothing = torch.empty(0, dtype=unit.dtype, device=unit.device)
        return UnitState(unit, self._part(unit), nothing, nothing, grads)

    def _issue(self, unit: Unit) -> None:
        held = self.held[unit]
        self._blank(held)
        with nullcontext() if self.overlaps else self._watch.apart():
            held.work = self._reduced(held.grads)

    def _reduced(self, grads: torch.Tensor) -> Work:
        return self.group.all_reduce(grads, wait=not self.overlaps)

    def publish(self) -> None:
        """Every rank has stepped: let all see the new parameters. A collective."""

    def scaled(self) -> None:
        """Every rank has scaled the gradients that it has."""

    # A micro-step

    def begin(self, last: bool) -> None:
        """A micro-step begins; `last`: this rank has no further one in this global batch."""
        self._reduction = GradReducer(self.units, self._issue, overlaps=self.overlaps) if last else None

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
        if self.overlaps:
            self._finish_reduction()

    def _finish_reduction(self) -> None:
        if self._reduction:
            self._reduction.finish()
            self._reduction, self._rounds = None, self._rounds + 1

    def end(self, rounds: int) -> None:
        """The global batch ends, with so many micro-steps on the rank that has most: all gradients are reduced."""
        # What is not reduced beside the backward pass waits until here: before it, others may need this rank's part in
        # what couples samples.
        self._finish_reduction()
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
        self._finish_reduction()

    def clear(self) -> None:
        """Gradients are gone: the next global batch begins."""
        for held in self.held.values():
            held.touched.clear()
            held.summed = False
        self._rounds = 0

    def _take(self, held: UnitState, piece: UnitParam, number: int) -> None:
        """Add a gradient to the buffer, the first by copying."""
        gradient, view = piece.parameter.grad, self._view(piece, held.grads)
        assert gradient is not None
        if number in held.touched:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            held.touched.add(number)
        piece.parameter.grad = None

    def _blank(self, held: UnitState) -> None:
        """What has no gradient on this rank may have one on another."""
        for number, piece in enumerate(held.unit.pieces):
            if number not in held.touched:
                piece.of(held.grads).zero_()

    def _settle(self, held: UnitState) -> None:
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

    def check_places(self) -> None:
        """Refuse parameters that are no longer where they were put."""
        for unit, held in self.held.items():
            for piece in unit.pieces if self.stage in (1, 2) else ():
                if piece.shape.numel() and piece.parameter.data_ptr() != piece.of(held.values).data_ptr():
                    raise UserError(
                        f"{piece.names[0]} was moved or cast after run.prepare, so what is trained is another tensor; "
                        "move and cast the model before run.prepare"
                    )

    # What the optimizer sees

    def touched(self) -> list[int]:
        """The numbers of parameters that got a gradient on this rank."""
        return [held.unit.pieces[number].index for held in self.held.values() for number in sorted(held.touched)]

    def gradients(self) -> list[torch.Tensor]:
        """All that this rank owns, each element once."""
        return [held.own_grads for unit, held in self.held.items() if unit.learns]

    def slices(self) -> Iterator[ParamShard]:
        """What this rank owns of every parameter that learns; nothing of some."""
        for unit, held in self.held.items():
            for piece in unit.pieces if unit.learns else ():
                yield from self._slice(held, piece)

    def _slice(self, held: UnitState, piece: UnitParam) -> Iterator[ParamShard]:
        # Whole tensors in their shape: any optimizer does with them what it always does.
        yield ParamShard(piece, 0, piece.shape.numel(), piece.parameter, self._view(piece, held.grads))


class Zero1(Zero0):
    """Stage 1: a rank steps its part of every unit; full parameters and gradients lie flat in the arena."""

    stage = 1
    parts = True

    def _view(self, piece: UnitParam, flat: torch.Tensor) -> torch.Tensor:
        # Row by row, so that a part of it is the same part whatever the layout: checkpoints count on that.
        return piece.of(flat)

    def _part(self, unit: Unit) -> range:
        sizes = self.shares.cut(unit.count)
        return range(sum(sizes[: self.group.rank]), sum(sizes[: self.group.rank + 1]))

    def _hold(self, unit: Unit) -> UnitState:
        part, values = self._part(unit), self._flat_values(unit)
        grads = self._grads(unit, part)
        grads.zero_()
        return UnitState(unit, part, values, values[part.start : part.stop], grads)

    def _flat_values(self, unit: Unit) -> torch.Tensor:
        """The parameters, moved into one buffer; the same on all ranks."""
        values = self.buffers.shared(unit.count, unit.dtype, unit.device, "parameters")
        flatten(unit, values)
        self.group.broadcast(values)
        return values

    def _grads(self, unit: Unit, part: range) -> torch.Tensor:  # noqa: ARG002 (stages differ)
        return self.buffers.shared(unit.count if unit.learns else 0, unit.dtype, unit.device, "gradients")

    def _reduced(self, grads: torch.Tensor) -> Work:
        return self.group.reduce_scatter(grads, shares=self.shares, wait=not self.overlaps)

    def publish(self) -> None:
        """Gather what the others have stepped."""
        learning = [held.values for unit, held in self.held.items() if unit.learns]
        for work in [self.group.all_gather(values, shares=self.shares, wait=False) for values in learning]:
            self._watch.waits(work)

    def _slice(self, held: UnitState, piece: UnitParam) -> Iterator[ParamShard]:
        start, stop = max(piece.start, held.part.start), min(piece.stop, held.part.stop)
        if start < stop:
            inside = slice(start - held.part.start, stop - held.part.start)
            grad = held.own_grads[inside]
            yield ParamShard(piece, start - piece.start, stop - piece.start, held.owned[inside], grad)


class Zero2(Zero1):
    """Stage 2: gradients are reduced in every micro-step, and a rank keeps the sum of its part alone."""

    stage = 2

    def __init__(
        self, group: Group, gathers: Group | None, units: Sequence[Unit], shares: Shares, watch: StepTimer
    ) -> None:
        self._flying: deque[tuple[UnitState, torch.Tensor, Work]] = deque()
        super().__init__(group, gathers, units, shares, watch)
        self.overlaps = True  # or the gradients of all units would lie here at once

    def _grads(self, unit: Unit, part: range) -> torch.Tensor:
        return self.buffers.own(len(part) if unit.learns else 0, unit.dtype, unit.device, "gradients")

    def begin(self, last: bool) -> None:  # noqa: ARG002 (every micro-step is reduced)
        """A micro-step begins."""
        super().begin(last=True)

    def _wanted(self, rounds: int) -> int:
        return rounds

    def _take(self, held: UnitState, piece: UnitParam, number: int) -> None:  # noqa: ARG002
        """It stays where it is until its whole unit goes."""
        held.touched.add(number)

    def _issue(self, unit: Unit) -> None:
        while len(self._flying) >= _IN_FLIGHT:
            self._land()
        held = self.held[unit]
        flat = self.buffers.shared(unit.count, unit.dtype, unit.device, IN_FLIGHT)
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
        self.buffers.free(flat, IN_FLIGHT)


def has_room(group: Group, units: Sequence[Unit]) -> bool:
    """Whether anything computes beside collectives without taking turns with them: a GPU, or a spare processor.

    Where ranks have one processor each, a collective beside the backward pass waits for a turn on both sides at every
    synchronisation, which costs more than it hides.
    """
    if units[0].device.type != "cpu":
        return True
    locations = group.endpoint.locations
    here = sum(locations[rank].host == locations[group.endpoint.rank].host for rank in group.members)
    return len(os.sched_getaffinity(0)) >= 2 * here


def flatten(unit: Unit, values: torch.Tensor) -> None:
    """Move a unit's parameters into one buffer; they stay the same objects."""
    values.zero_()
    for piece in unit.pieces:
        place = piece.of(values)
        place.copy_(piece.parameter.detach())
        piece.parameter.data = place
