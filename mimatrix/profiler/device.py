"""One device and one model: time and memory against the batch, what the optimizer and each stage cost."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mimatrix.core.errors import UserError
from mimatrix.core.units import format_bytes
from mimatrix.planner.curve import Curve
from mimatrix.planner.profile import PerStage, Profile
from mimatrix.profiler.batch_search import BatchSizeSearch, ProbedBatch
from mimatrix.profiler.fingerprints import device_name
from mimatrix.profiler.memory import OutOfMemory, attempted, peak_bytes, with_less
from mimatrix.profiler.memory_budget import room
from mimatrix.profiler.optimizer import TWIN_ELEMENTS, learning, optimizer_cost
from mimatrix.profiler.timing import synchronise, timed
from mimatrix.profiler.trial import ProfileTarget, Trial, untouched

# A process that takes more than its control group has is killed, and nothing is caught; a GPU says no in time.
_WITHIN = 0.85
_REST = 0.15
"""Of the time, for the optimizer and what stages add."""
_GROWS = 2.0
"""So many times the time may be spent on top, while larger batches still bring more throughput."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a measurement may go."""

    most: int
    """No rank will need a larger micro-batch: the global batch."""
    room_bytes: int | None = None
    """For all that this rank holds of the job, parameters included; None: what there is."""
    seconds: float = 20.0
    """About how long it may take."""
    neighbours: int = 1
    """Ranks that share this device's memory, this one included."""
    sharers: int = 1
    """Ranks that share the limit of a control group, this one included."""


def measure_device(subject: ProfileTarget, limits: Limits, say: Callable[[float], None] = lambda _: None) -> Profile:
    """Measure this rank's device; `say` hears how much is done, from 0 to 1. Nothing of the user's is changed."""
    room_bytes = room_for(subject, limits)
    found = attempted(lambda: _measured(subject, limits, room_bytes, say), subject.device)
    if isinstance(found, OutOfMemory):  # even before the first sample
        raise _too_small(subject.device, room_bytes, found.lacking_bytes)
    return found


def _measured(subject: ProfileTarget, limits: Limits, room_bytes: int, say: Callable[[float], None]) -> Profile:
    started, device = time.monotonic(), subject.device
    with untouched(subject.model, device):
        passes = Trial(subject)
        with passes.hooked():
            search = _Probing(subject, passes, limits, room_bytes, say).finished(started)
        cost = with_less(lambda elements: optimizer_cost(subject.optimizer, device, elements), TWIN_ELEMENTS, device)
        handling = with_less(lambda size: handling_s(subject, size), subject.unit_bytes, device)
    say(1.0)
    return Profile(
        device=device_name(device),
        model=subject.fingerprint,
        seconds=Curve.of((point.samples, point.seconds) for point in search.points),
        # A step of the optimizer comes after the micro-batches, so the larger of the two must have room.
        memory=Curve.of((point.samples, max(point.memory_bytes, cost.passing_bytes)) for point in search.points),
        room_bytes=room_bytes,
        optimizer_s=cost.seconds,
        handling_s=handling,
        noise=search.noise,
        took_s=time.monotonic() - started,
        overflows=search.overflows,
    )


def room_for(subject: ProfileTarget, limits: Limits) -> int:
    """Bytes for all that this rank may hold of the job: what is left, and the parameters that are there already."""
    if limits.room_bytes is not None:
        return limits.room_bytes
    return room(subject.device, limits.neighbours, limits.sharers) + _parameter_bytes(subject)


def handling_s(subject: ProfileTarget, unit_bytes: int) -> PerStage:
    """What each stage adds to a micro-batch beside the one copy of the gradients that every pass makes.

    Stage 2 adds its part of each unit to the sums. Stage 3 also makes room for each unit, on the way forward and back,
    and puts its part there. A part is counted as a whole: on which ranks it is small is not known here.
    """
    device = subject.device
    unit = torch.zeros(max(1, unit_bytes // 4), device=device)
    sums = torch.zeros_like(unit)
    added = timed(lambda: sums.add_(unit), device).seconds
    placed = timed(lambda: torch.empty_like(unit).copy_(unit), device).seconds
    size = unit.numel() * unit.element_size()
    gradients = sum(each.numel() * each.element_size() for each in learning(subject.optimizer)) / size
    parameters = _parameter_bytes(subject) / size
    return (0.0, 0.0, gradients * added, gradients * added + 2 * parameters * placed)


class _Probing:
    """Does what a search asks for, on the device."""

    def __init__(
        self, subject: ProfileTarget, passes: Trial, limits: Limits, room_bytes: int, say: Callable[[float], None]
    ) -> None:
        self._subject, self._passes, self._limits, self._say = subject, passes, limits, say
        self._device = subject.device
        self._room_bytes = room_bytes
        self._done = 0.0

    def finished(self, started: float) -> BatchSizeSearch:
        """All points that can be had in the time."""
        least = self._warmed_up()
        beside = _parameter_bytes(self._subject) + self._passes.scratch_bytes
        left = (_WITHIN if self._device.type == "cpu" else 1.0) * (self._room_bytes - beside)
        search = BatchSizeSearch(max(least, self._limits.most), max(0.0, left), least, dares=self._device.type != "cpu")
        ends = started + (1 - _REST) * self._limits.seconds
        grown = ends + _GROWS * self._limits.seconds
        while (samples := search.next(ends - time.monotonic(), grown - time.monotonic())) is not None:
            found = attempted(lambda samples=samples: self._probe(samples), self._device)  # type: ignore[misc]
            if isinstance(found, OutOfMemory):
                search.overflowed(samples)
                if not search.points:
                    raise self._too_small(found.lacking_bytes)
            else:
                search.measured(found)
                self._check(search.points[0])
            self._tell(samples, 1 - (ends - time.monotonic()) / max(self._limits.seconds, 1e-9))
        return search

    def _warmed_up(self) -> int:
        """Run the smallest batch once, so that whatever is set up only once is there; how many samples it has."""
        try:
            found = attempted(lambda: self._passes.run(1), self._device)
            least = 1
        except ValueError as error:
            # Batch norm cannot learn from one value; over the ranks it has more.
            if "more than 1 value per channel" not in str(error):
                raise
            found, least = attempted(lambda: self._passes.run(2), self._device), 2
        if isinstance(found, OutOfMemory):
            raise self._too_small(found.lacking_bytes)
        return least

    def _probe(self, samples: int) -> ProbedBatch:
        device = self._device
        if device.type != "cpu":
            # Libraries try ways to compute at the first sight of a size, and need room for it.
            self._passes.run(samples)
        memory = peak_bytes(lambda: self._passes.run(samples), device)
        began = time.perf_counter()
        if device.type != "cpu":
            self._passes.run(samples)  # the reading emptied the allocator's cache, which takes time to fill
            synchronise(device)
        took = timed(lambda: self._passes.run(samples), device, time.perf_counter() - began)
        return ProbedBatch(samples, took.seconds, memory, took.noise)

    def _check(self, smallest: ProbedBatch) -> None:
        """Refuse a device that cannot hold the activations of the smallest batch in any stage."""
        lacking = smallest.memory_bytes - self._room_bytes
        if lacking > 0:
            raise self._too_small(int(lacking))

    def _too_small(self, lacking: int) -> UserError:
        return _too_small(self._device, self._room_bytes, lacking)

    def _tell(self, samples: int, spent: float) -> None:
        grown = math.log2(samples + 1) / math.log2(self._limits.most + 2)
        self._done = max(self._done, min(1 - _REST, max(spent, (1 - _REST) * grown)))
        self._say(self._done)


def _too_small(device: torch.device, room_bytes: int, lacking: int) -> UserError:
    lacks = f"at least {format_bytes(lacking)}" if lacking else "memory"
    return UserError(
        f"{device_name(device)} ({device}) lacks {lacks} for one sample beside the model, with "
        f"{format_bytes(room_bytes)} in all; give it more memory, use a smaller model, or leave it out"
    )


def _parameter_bytes(subject: ProfileTarget) -> int:
    return sum(each.numel() * each.element_size() for each in subject.model.parameters())
