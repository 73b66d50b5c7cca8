"""What the user's loop iterates over: this rank's micro-batches. Between them the run does what is due."""

from collections.abc import Generator, Iterator
from typing import Any

from mimatrix.engine.loop.train_loop import TrainLoop


class MicroBatchLoader:
    """The micro-batches of this rank, on its device."""

    def __init__(self, loop: TrainLoop) -> None:
        self._loop = loop

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return len(self._loop.source)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch in which the run is."""
        while (yield from self._pass_over_data()) and self._loop.repeats_epoch():
            pass

    def _pass_over_data(self) -> Generator[Any, None, bool]:
        """Go once through the samples, or what is left of them; return False if the loop ended before."""
        loop, position = self._loop, self._loop.position
        loop.begin_epoch()
        micro_batches = loop.source.epoch(position.epoch, position.batch)
        try:
            while True:
                drawn = loop.draw(micro_batches)
                loop.finish_micro_step()
                if not loop.continues():
                    return False
                if drawn is None:
                    break
                micro, batch = drawn
                if loop.begin_micro_step(micro):
                    yield batch
        finally:
            loop.leave()
        loop.end_epoch(position.epoch)
        return True
