"""What the user's loop runs over: this rank's micro-batches. Between them it lets the run do what is due."""

from collections.abc import Generator, Iterator
from typing import Any

from mimatrix.engine.loop.train_loop import TrainLoop


class MicroBatchLoader:
    """The micro-batches of this rank, on its device."""

    def __init__(self, course: TrainLoop) -> None:
        self._course = course

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return len(self._course.feed)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch in which the run stands."""
        while (yield from self._round()) and self._course.begins_again():
            pass

    def _round(self) -> Generator[Any, None, bool]:
        """Once through the samples, or what is left of them; False if the loop has ended before."""
        course, position = self._course, self._course.position
        course.begin_epoch()
        parts = course.feed.epoch(position.epoch, position.batch)
        try:
            while True:
                found = course.drawn(parts)
                course.settle()
                if not course.goes_on():
                    return False
                if found is None:
                    break
                micro, batch = found
                if course.enter(micro):
                    yield batch
        finally:
            course.leave_loop()
        course.end_epoch(position.epoch)
        return True
