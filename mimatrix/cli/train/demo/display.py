"""The state of the demo, from the lines of its workers: pure, so that a demo can be replayed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UP = 3
"""Steps of a phase that do not count: buffers are made, and a plan may still settle."""


@dataclass(slots=True)
class Lane:
    """One worker in one phase: sums over the steps that count."""

    steps: int = 0
    """All that were reported."""
    seconds: float = 0.0
    busy_s: float = 0.0
    moving_s: float = 0.0
    waiting_s: float = 0.0

    def part(self, seconds: float) -> float:
        """Return a part of the time that counts."""
        return seconds / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class TrainingPhase:
    """One way to train, and its results."""

    lanes: list[Lane]
    state: str = ""
    steps: int = 0
    """Steps that it will have."""
    batches: tuple[int, ...] = ()
    accuracy: float = 0.0
    losses: tuple[float, ...] = ()
    predicted_s: float | None = None

    @property
    def samples_per_s(self) -> float:
        """The throughput of all workers, which step together: each step is a global batch."""
        return sum(self.batches) / self.step_s if self.step_s else 0.0

    @property
    def idle(self) -> float:
        """The part of all workers' time that is spent waiting for others."""
        return sum(lane.part(lane.waiting_s) for lane in self.lanes) / len(self.lanes)

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        counted = [lane.seconds / (lane.steps - WARM_UP) for lane in self.lanes if lane.steps > WARM_UP]
        return sum(counted) / len(counted) if counted else 0.0


@dataclass(slots=True)
class Board:
    """Everything that was reported so far."""

    ranks: int
    phases: dict[str, TrainingPhase] = field(default_factory=dict)
    alone: dict[int, float] = field(default_factory=dict)
    """Samples a second of each worker that works alone."""

    @property
    def ideal(self) -> float:
        """What all workers can do without exchanging anything."""
        return sum(self.alone.values())

    @property
    def now(self) -> tuple[str, TrainingPhase] | None:
        """The current phase."""
        return list(self.phases.items())[-1] if self.phases else None

    def read_line(self, rank: int, text: str) -> bool:
        """Read one line of a worker; return False if it is not one of ours."""
        try:
            fields = json.loads(text)
            name, event = str(fields["phase"]), str(fields["event"])
        except (ValueError, KeyError, TypeError):
            return False
        phase = self.phases.setdefault(name, TrainingPhase([Lane() for _ in range(self.ranks)]))
        match event:
            case "step":
                phase.state = "training"
                _count(phase.lanes[rank], fields)
            case "began":
                phase.state, phase.steps = "training", int(fields["steps"])
                phase.batches, phase.predicted_s = tuple(fields["batches"]), fields.get("predicted_s")
            case "ended" if name == "alone":
                self.alone[rank] = fields["samples"] / fields["seconds"]
            case "ended":
                phase.batches, phase.accuracy = tuple(fields["batches"]), float(fields["accuracy"])
                phase.losses = tuple(fields["losses"])
            case _:
                phase.state = event
        return True


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker in one phase."""

    rank: int
    speed: float
    batch: int
    busy: float
    """As parts of its time, like the two that follow."""
    moving: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Way:
    """The results of one way to train."""

    samples_per_s: float
    idle: float
    accuracy: float
    fraction_of_ideal: float
    step_s: float
    predicted_step_s: float | None
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The results of the demo."""

    even: Way
    planned: Way
    ideal_samples_per_s: float
    alone_samples_per_s: tuple[float, ...]
    speedup: float
    largest_loss_difference: float
    """Over all steps: both train the same model on the same global batches."""
    seconds: float


def summarize(board: Board, speeds: Sequence[float], seconds: float) -> Result:
    """Return the results of a demo that has ended."""
    even, planned = (board.phases[name] for name in ("even", "planned"))
    differences = (abs(one - other) for one, other in zip(even.losses, planned.losses, strict=True))
    return Result(
        _way(even, board, speeds),
        _way(planned, board, speeds),
        board.ideal,
        tuple(board.alone[rank] for rank in range(board.ranks)),
        planned.samples_per_s / even.samples_per_s,
        max(differences, default=0.0),
        seconds,
    )


def _way(phase: TrainingPhase, board: Board, speeds: Sequence[float]) -> Way:
    workers = tuple(
        Worker(rank, speed, batch, lane.part(lane.busy_s), lane.part(lane.moving_s), lane.part(lane.waiting_s))
        for rank, (speed, batch, lane) in enumerate(zip(speeds, phase.batches, phase.lanes, strict=True))
    )
    rate = phase.samples_per_s
    return Way(rate, phase.idle, phase.accuracy, rate / board.ideal, phase.step_s, phase.predicted_s, workers)


def _count(lane: Lane, fields: Mapping[str, Any]) -> None:
    lane.steps += 1
    if lane.steps <= WARM_UP:
        return
    for name in ("seconds", "busy_s", "moving_s", "waiting_s"):
        setattr(lane, name, getattr(lane, name) + float(fields[name]))
