"""Where a run is in its epochs: the next global batch, and the epochs that the user's loops have begun."""

import logging

from mimatrix.engine.data.position import DataPosition, MicroBatch
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.outer_optimizer import OuterOptimizer

logger = logging.getLogger(__name__)


class EpochCursor:
    """The next global batch of this rank, and when an epoch is over."""

    def __init__(self, source: MicroBatchSource, outer: OuterOptimizer | None) -> None:
        self._source, self._outer = source, outer
        self.position = DataPosition(0, 0)
        """The next global batch."""
        self.num_epochs: int | None = None
        """How many there will be, if the loop has said so."""
        self.yielded = 0
        """The epoch that `run.epochs` gave last."""
        self.draws = 0
        """Micro-batches that the loop over the loader has drawn."""
        self._has_warned = False
        self._first = 0
        """The epoch in which the loop over the loader began."""
        self._begun: int | None = None
        """The epoch of the samples that a loop over the loader has begun in this process."""
        self._skipped_samples = 0
        """Samples of steps that were left out, which other groups do not count."""

    @property
    def epoch(self) -> int:
        """The epoch; where groups share their parameters, counted by the samples of all groups together."""
        if self._outer is None:
            return self.position.epoch
        return (self._outer.samples + self._skipped_samples) // self._source.num_samples

    @property
    def was_left_early(self) -> bool:
        """Whether a loop has begun this epoch and left it; a checkpoint's epoch has not begun in this process."""
        return self._outer is None and self.position.batch > 0 and self._begun == self.position.epoch

    @property
    def is_over(self) -> bool:
        """Whether all groups together have had the samples of the epoch in which the loop began."""
        return self._outer is not None and self._first < self.epoch

    def begin_pass(self) -> None:
        """Begin a pass over the samples, or over what is left of them."""
        self._begun = self.position.epoch
        self._first = max(self.epoch, self.yielded)

    def advance(self, micro: MicroBatch, *, was_skipped: bool) -> None:
        """Move to the global batch after that of a micro-batch."""
        self.position = micro.next_position()
        if self._outer and was_skipped:
            self._skipped_samples += micro.global_samples

    def check_drawn(self, micro: MicroBatch | None) -> None:
        """Warn once of a loop that seems to take `len(loader)` for the number of its micro-batches."""
        if not self.was_left_early or micro is None or micro.num_micro_steps < 2 or not self._source.has_length:
            return
        if self.draws == len(self._source) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the last loop drew len(loader) = %d micro-batches and left the rest of the epoch out; len(loader) "
                "counts global batches, and each has several micro-batches here: draw until the iterator ends",
                self.draws,
            )

    def begin_next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.position = self.next_epoch

    @property
    def next_epoch(self) -> DataPosition:
        """The start of the next epoch."""
        return DataPosition(self.position.epoch + 1, 0)

    def resume(self, position: DataPosition) -> None:
        """Continue where a checkpoint was saved."""
        self.position, self._begun = position, None

    def next_number(self, last: int) -> int:
        """Return the number of the epoch after `last`, of which whatever was left out is over."""
        if self._outer:
            return max(last + 1, self.epoch)
        if self.position.epoch == last:
            self.begin_next_epoch()
        return self.position.epoch
