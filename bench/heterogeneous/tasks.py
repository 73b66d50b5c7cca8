"""One training on ranks of unequal speed: the task of the ranks, and what each of them records."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from mimatrix.launch import RunSpec, module_command, run_local

LEAST_STEPS = 6
NOTHING = "nothing"
"""Who only starts: what a rank holds before it has a model."""


class RanksFailedError(Exception):
    """Raised if the ranks did not finish; says why."""


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A training by one competitor. The model is `depth` linear layers of `width` with ReLU between them."""

    who: str
    speeds: tuple[float, ...]
    global_batch: int = 1920
    width: int = 1024
    depth: int = 6
    batches: int = 16
    """Global batches in an epoch."""
    optimizer: str = "sgd"
    double: bool = False
    warm_up: int = 6
    """Steps before what is measured."""
    seconds: float = 6.0
    """How long to measure, about."""
    most: int = 12
    """Steps to measure at the most."""
    memory_bytes: tuple[int, ...] = ()
    """What each rank may use, itself included; nothing: no limit."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.speeds)

    def to_text(self) -> str:
        """Return the task as text for `from_text`, in another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "TrainingTask":
        """Read the text of `to_text`."""
        fields = json.loads(text)
        return cls(**{**fields, "speeds": tuple(fields["speeds"]), "memory_bytes": tuple(fields["memory_bytes"])})


@dataclass(slots=True)
class RankRecord:
    """The record of one rank. Times are of the clock that all processes of a machine share."""

    began_s: float
    """When all ranks had found one another."""
    ends_s: list[float] = field(default_factory=list)
    """When each step ended."""
    sums: list[float] = field(default_factory=list)
    """The loss over this rank's samples of each step, summed."""
    warm_up: int = 0
    rate: float = 0.0
    """Samples a second of a rank alone."""
    micro_batch: int = 0
    """With which it was so fast."""
    plan: dict[str, Any] = field(default_factory=dict)
    """As it is at the end."""
    peak_bytes: int = 0

    @property
    def steady_s(self) -> float:
        """Mean seconds of a measured step."""
        steps = len(self.ends_s) - self.warm_up
        return (self.ends_s[-1] - self.ends_s[self.warm_up - 1]) / steps

    @property
    def before_s(self) -> float:
        """Seconds from when all ranks had met to the first step: preparing, measuring, planning."""
        return self.ends_s[0] - self.began_s - self.steady_s


@dataclass
class Meter:
    """Counts the steps of one rank; rank 0 writes the last step into a file that the others read.

    Ranks meet in every step, so none is more than one step ahead of rank 0, and reads it in time.
    """

    task: TrainingTask
    folder: Path
    rank: int
    clock: Any
    record: RankRecord
    last: int | None = None

    def ends_step(self, loss_sum: float) -> bool:
        """Record the end of a step, with the loss over all samples of this rank; return whether another one follows."""
        self.record.ends_s.append(self.clock())
        self.record.sums.append(loss_sum)
        done = len(self.record.ends_s)
        if self.rank == 0 and done == self.task.warm_up:
            self._decide()
        return not self.is_over(done)

    def is_over(self, done: int) -> bool:
        """Return whether `done` steps are all of them."""
        path = self.folder / "last"
        if self.last is None and path.is_file():
            self.last = int(path.read_text())
        return self.last is not None and done >= self.last

    def _decide(self) -> None:
        ends = self.record.ends_s[-3:]
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        steps = min(self.task.most, max(LEAST_STEPS, round(self.task.seconds / step_s)))
        whole = self.folder / "last.part"
        whole.write_text(str(self.task.warm_up + steps))
        whole.rename(self.folder / "last")


def train(task: TrainingTask, timeout_s: float = 600.0, **variables: str) -> list[RankRecord]:
    """Start the ranks under quotas and wait for them; return the record of each, by rank."""
    with folder() as place:
        return train_in(task, place, timeout_s, **variables)


def train_in(task: TrainingTask, place: Path, timeout_s: float = 600.0, **variables: str) -> list[RankRecord]:
    """Train in a given folder, in which the caller can watch the progress."""
    words = module_command("bench.heterogeneous.worker", [task.to_text(), str(place)])
    launch = RunSpec(
        words,
        ranks=task.ranks,
        speeds=task.speeds,
        memory=task.memory_bytes,
        slow_by="quota",
        threads=1,
        timeout_s=timeout_s,
    )
    outside = {**os.environ, "MIMATRIX_CACHE": str(place / "cache"), "PYTHONWARNINGS": "ignore", **variables}
    out, err = BytesIO(), BytesIO()
    outcome = run_local(launch, outside, out, err, lambda _: None)
    if outcome.code:
        raise RanksFailedError(_why(outcome.describe(), err.getvalue().decode(errors="replace")))
    return [RankRecord(**json.loads((place / f"rank-{rank}.json").read_text())) for rank in range(task.ranks)]


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a folder for one training, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="mimatrix-bench-") as made:
        yield Path(made)


def losses(records: Sequence[RankRecord], global_batch: int) -> list[float]:
    """Return the mean loss of every step over all ranks. A rank that never had data wrote nothing."""
    sums = [record.sums for record in records if record.sums]
    return [sum(step) / global_batch for step in zip(*sums, strict=True)]


def _why(reason: str, said: str) -> str:
    """Return the reason why all ended, with the exception that a rank died of."""
    found = re.search(r"^(?:\[\w+\]:? ?)*((?:\w+\.)*\w*(?:Error|Exception): .+)$", said, re.MULTILINE)
    last = said.strip().rpartition("\n")[2]
    return f"{reason}: {found[1] if found else last}" if found or last else reason
