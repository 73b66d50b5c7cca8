"""What the user's loop runs over: this rank's micro-batches. Between them it lets the run do what is due."""

from collections.abc import Generator, Iterator
from typing import Any, Protocol

from mimatrix.engine.feed import Feed, Micro, Position


class Course(Protocol):
    """A run, as its loader sees it."""

    position: Position

    def begin_epoch(self) -> None:
        """A loop begins."""
        ...

    def drawn(self, parts: Iterator[tuple[Micro, Any]]) -> tuple[Micro, Any] | None:
        """The next part."""
        ...

    def settle(self) -> None:
        """Finish the micro-step before."""
        ...

    def goes_on(self) -> bool:
        """Whether the loop goes on."""
        ...

    def enter(self, micro: Micro) -> bool:
        """The next micro-step; False if this rank has no data in it."""
        ...

    def leave_loop(self) -> None:
        """The loop has ended, however it did."""
        ...

    def end_epoch(self, epoch: int) -> None:
        """All micro-batches of an epoch have been run through."""
        ...

    def begins_again(self) -> bool:
        """Whether the loop goes on with another round through them."""
        ...


class Loader:
    """The micro-batches of this rank, on its device."""

    def __init__(self, run: Course, feed: Feed) -> None:
        self._run, self.feed = run, feed

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return len(self.feed)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch in which the run stands."""
        while (yield from self._round()) and self._run.begins_again():
            pass

    def _round(self) -> Generator[Any, None, bool]:
        """Once through the samples, or what is left of them; False if the loop has ended before."""
        run, position = self._run, self._run.position
        run.begin_epoch()
        parts = self.feed.epoch(position.epoch, position.batch)
        try:
            while True:
                found = run.drawn(parts)
                run.settle()
                if not run.goes_on():
                    return False
                if found is None:
                    break
                micro, batch = found
                if run.enter(micro):
                    yield batch
        finally:
            run.leave_loop()
        run.end_epoch(position.epoch)
        return True
