"""What the user's loop iterates over: this rank's micro-batches. Between them the run does what is due."""

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

from mimatrix.comm.control.user_calls import Caller
from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import MicroBatch
from mimatrix.engine.loop.batch_agreement import BatchAgreement
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.user_calls import END_OF_LOOP, LOADER, iterate_as_user_call

_MOST_IDLE = 10_000
"""Global batches without data that a rank looks past, when it reads ahead: a stream may not end."""


class MicroBatchLoader:
    """The micro-batches of this rank, on its device."""

    def __init__(self, loop: TrainLoop, caller: Caller, agreement: BatchAgreement, *, read_ahead: bool = False) -> None:
        self._loop, self._caller, self._agreement, self._read_ahead = loop, caller, agreement, read_ahead

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return len(self._loop.source)

    @property
    def dataset(self) -> Any:
        """The dataset that was given to `run.prepare`."""
        return self._loop.source.dataset

    @property
    def batch_size(self) -> int:
        """The number of samples in a global batch, over all ranks."""
        return self._loop.split.total

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch; after `run.load`, over what is left of the epoch in which the run is."""
        return iterate_as_user_call(self._caller, LOADER, self._iterate())

    def _iterate(self) -> Iterator[Any]:
        iterator = self._loop.open_iterator()
        try:
            while (yield from self._pass_over_data(iterator)) and self._loop.repeats_epoch():
                pass
        finally:
            self._loop.close_iterator(iterator)

    def _pass_over_data(self, iterator: object) -> Generator[Any, None, bool]:
        """Go once through the samples, or what is left of them; return False if the loop ended before."""
        loop, position = self._loop, self._loop.position
        loop.begin_epoch()
        epoch = loop.source.epoch(position.epoch, position.batch, position.stream, position.order)
        drawn = DrawnMicroBatches(loop, epoch)
        if self._read_ahead and (first := drawn.peek()):
            yield first[1]
            loop.check_iterator(iterator)
        while True:
            next_drawn = drawn.pop()
            loop.finish_micro_step()
            with self._caller.calling(END_OF_LOOP, overrides=True):
                continues = loop.continues()
            if not continues:
                return False
            next_drawn = self._agreement.agree(next_drawn, loop.position)
            if next_drawn is None:
                break
            micro, batch = next_drawn
            if not loop.begin_micro_step(micro):
                continue
            if self._read_ahead:
                ahead = drawn.peek()
                if ahead is None:
                    # The loop has still to train on the last micro-batch; the epoch ends when it begins another one.
                    loop.detach_iterator()
                    return False
                batch = ahead[1]
            yield batch
            loop.check_iterator(iterator)
        with self._caller.calling(END_OF_LOOP, overrides=True):
            loop.end_epoch()
        return True


class DrawnMicroBatches:
    """Micro-batches as they are drawn from the source, which can be looked at before they are due."""

    def __init__(self, loop: TrainLoop, micro_batches: Iterator[tuple[MicroBatch, Any]]) -> None:
        self._loop, self._micro_batches = loop, micro_batches
        self._drawn: deque[tuple[MicroBatch, Any]] = deque()

    def pop(self) -> tuple[MicroBatch, Any] | None:
        """Return the next one; None at the end."""
        return self._drawn.popleft() if self._drawn else self._loop.draw(self._micro_batches)

    def peek(self) -> tuple[MicroBatch, Any] | None:
        """Return the next one that has data, and keep it and those before it."""
        while not self._drawn or not self._drawn[-1][0].num_micro_steps:
            if len(self._drawn) > _MOST_IDLE:
                raise UserError(
                    f"this rank has no data in {_MOST_IDLE} global batches, and cannot read ahead until it has some; "
                    "give every rank data, or leave out read_ahead"
                )
            drawn = self._loop.draw(self._micro_batches)
            if drawn is None:
                return None
            self._drawn.append(drawn)
        return self._drawn[-1]
