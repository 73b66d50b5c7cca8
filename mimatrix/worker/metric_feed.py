"""What a script logs, as the job server is told: not every loss of every step, but every evaluation."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

Entry = tuple[int, dict[str, float]]
"""A step, and what was logged for it."""
_RECENT = 64
_FEW = 8
"""Entries before it is known what is logged how often."""
_MAX_WAITING = 1000
_MAX_NAMES, _MAX_BYTES = 32, 4096
"""Of one entry; the entries that are sent at once have as many bytes."""
_VALUE_BYTES = 24
"""At most, of a number in JSON with what separates it from the next."""


class MetricFeed:
    """The newest value of what is logged in most steps; of everything else each value, until it is sent.

    Reports come every few seconds, steps more often: a curve of losses needs only some of them. An evaluation that is
    logged once in a while has a point of its own, at its step.
    """

    def __init__(self) -> None:
        self._recent: deque[frozenset[str]] = deque()
        self._counts: Counter[str] = Counter()
        """In how many of the recent entries each name is."""
        self._newest: dict[str, float] = {}
        self._waiting: deque[Entry] = deque(maxlen=_MAX_WAITING)

    def __len__(self) -> int:
        """Return how many entries were not sent yet."""
        return len(self._waiting)

    def add(self, entries: Iterable[Entry], *, keeps: bool = True) -> None:
        """Add what was logged since the last time; `keeps`: whether this rank tells the server."""
        for step, values in entries:
            self._count(frozenset(values))
            self._newest |= values
            is_early = len(self._recent) < _FEW
            rare = {name: value for name, value in values.items() if is_early or not self._is_frequent(name)}
            if keeps:
                self._waiting.extend((step, part) for part in _cut(rare))

    @property
    def newest(self) -> dict[str, float]:
        """The newest values of what is logged in most steps."""
        return {name: value for name, value in self._newest.items() if self._is_frequent(name)}

    def waiting(self, most: int) -> list[Entry]:
        """Return the oldest entries that were not sent yet, and no more than fit into a report."""
        found: list[Entry] = []
        size = 0
        for entry in list(self._waiting)[:most]:
            size += _size(entry[1])
            if found and size > _MAX_BYTES:
                break
            found.append(entry)
        return found

    def drop(self, count: int) -> None:
        """Forget the oldest entries: they were sent."""
        for _ in range(min(count, len(self._waiting))):
            self._waiting.popleft()

    def _count(self, names: frozenset[str]) -> None:
        self._recent.append(names)
        self._counts.update(names)
        if len(self._recent) > _RECENT:
            self._counts.subtract(self._recent.popleft())

    def _is_frequent(self, name: str) -> bool:
        """Tell whether at least half of the recent entries have it."""
        return 2 * self._counts[name] >= len(self._recent)


def _cut(values: Mapping[str, float]) -> Iterator[dict[str, float]]:
    """Yield parts that fit into a report, each under the same step."""
    part: dict[str, float] = {}
    for name, value in values.items():
        if len(part) == _MAX_NAMES or _size({**part, name: value}) > _MAX_BYTES:
            yield part
            part = {}
        part[name] = value
    if part:
        yield part


def _size(values: Mapping[str, float]) -> int:
    return sum(len(name[:100].encode()) + _VALUE_BYTES for name in values) + _VALUE_BYTES
