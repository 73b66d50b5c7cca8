"""Places in the training data: a global batch of an epoch, and a micro-batch of one rank in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mimatrix.engine.data.stream import StreamPosition
from mimatrix.planner.model.split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The place of a micro-batch: number `index` of this rank in global batch `batch` of `epoch`.

    If `sizes` is empty, the rank has no samples in this global batch, and the micro-batch comes without data.
    """

    epoch: int
    batch: int
    index: int
    sizes: tuple[int, ...]
    """Samples of each micro-batch of this rank in the global batch."""
    split: Split
    """How the global batch is split over the ranks; where each has its own stream, only known once they have agreed."""
    digest: str | None = field(default=None, compare=False)
    """Of what all ranks must find the same: samples of the global batch, or the order of the epoch. At the start of a
    rank's own stream, of what they must find to differ. Also of a stream that is not compared, as "". None if there is
    nothing to agree on."""
    stream: StreamPosition | None = field(default=None, compare=False)
    """Where this rank is in an iterable dataset after the global batch."""
    order: str | None = field(default=None, compare=False)
    """A digest of the order of the epoch, if the user's code gives it."""

    @property
    def num_micro_steps(self) -> int:
        """Micro-steps of this rank in the global batch."""
        return len(self.sizes)

    @property
    def max_micro_steps(self) -> int:
        """The largest `num_micro_steps` of any rank in the global batch."""
        return self.split.rounds

    @property
    def num_samples(self) -> int:
        """Samples in this micro-batch."""
        return self.sizes[self.index] if self.sizes else 0

    @property
    def global_samples(self) -> int:
        """Samples in the global batch, over all ranks."""
        return self.split.total

    @property
    def is_last(self) -> bool:
        """Whether this is the rank's last micro-batch of the global batch."""
        return self.index + 1 >= self.num_micro_steps

    def next_position(self) -> "DataPosition":
        """Return the position after the global batch."""
        return DataPosition(self.epoch, self.batch + 1, stream=self.stream, order=self.order)


@dataclass(frozen=True, slots=True, order=True)
class DataPosition:
    """A global batch of an epoch. Positions are ordered as in training."""

    epoch: int
    batch: int
    stream: StreamPosition | None = field(default=None, compare=False, kw_only=True)
    """Where this rank is in an iterable dataset; None where the number of the global batch says it all."""
    order: str | None = field(default=None, compare=False, kw_only=True)
    """A digest of the order of the epoch, if the user's code gives it and the epoch has begun."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict for `from_json`, of what is the same on all ranks."""
        return {"epoch": self.epoch, "batch": self.batch} | ({"order": self.order} if self.order else {})

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "DataPosition":
        """Return the position that `to_json` described."""
        return cls(fields["epoch"], fields["batch"], order=fields.get("order"))
