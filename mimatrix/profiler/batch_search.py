"""Which batch to measure next, and when to stop: what was found goes in, the next probe comes out, no device in sight.

First it grows, by doubling, up to the largest batch that is wanted or that memory lets in; then it looks closer where
the points so far do not foretell one another. So when time is short, refining ends first.
"""

import math
from dataclasses import dataclass, replace

from scipy.interpolate import PchipInterpolator

_MOST_PROBES = 24
_MOST_REFINEMENTS = 8
_MOST_OVERFLOWS = 2
"""After so many there is no further way up: what fits is known well enough, and running out of memory is risky."""
_MARGIN = 1.15
"""By how much memory may grow faster than it did before."""
_CLOSE = 1.05
"""The largest batch that fits is known when the next one to be tried is no further away than this."""
_FLAT = 1.02
"""Throughput that grows less than this from one doubling to the next does not grow."""
_TOLERANCE = 0.03
_NARROW = 1.1
"""Points that are closer than this have nothing between them worth knowing."""
WINDOW_S = 0.06
SLOW_S = 1.0
"""A pass of this length and more is timed once."""


@dataclass(frozen=True, slots=True)
class ProbedBatch:
    """What was measured with micro-batches of `samples`."""

    samples: int
    seconds: float
    memory_bytes: float
    noise: float = 0.0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / max(self.seconds, 1e-12)


class BatchSizeSearch:
    """Measures batches of `least` to `most` samples that need at most `room_bytes`.

    `dares`: where memory that runs out is noticed and nothing worse, a guess may be tried.
    """

    def __init__(self, most: int, room_bytes: float, least: int = 1, *, dares: bool = True) -> None:
        assert 1 <= least <= most, f"batches of {least} to {most}"
        self._least, self._most, self._room, self._dares = least, most, room_bytes, dares
        self._points: dict[int, ProbedBatch] = {}
        self._too_large: int | None = None
        self.overflows = 0
        self._probes = self._refined = 0
        self._checked: set[int] = set()

    @property
    def points(self) -> list[ProbedBatch]:
        """All that was measured, the smallest batch first."""
        return [self._points[samples] for samples in sorted(self._points)]

    @property
    def noise(self) -> float:
        """How much times differ from run to run at a usual point, as a part."""
        found = sorted(point.noise for point in self._points.values())
        return found[len(found) // 2] if found else 0.0

    def measured(self, point: ProbedBatch) -> None:
        """A probe went well. Of a second one of the same batch the quicker counts: others can only have held it up."""
        self._probes += 1
        if self._points and point.samples <= self.points[-1].samples:
            self._refined += 1
        before = self._points.get(point.samples, point)
        if before is not point:
            self._checked.add(point.samples)
            point = replace(
                min(before, point, key=lambda each: each.seconds),
                memory_bytes=max(before.memory_bytes, point.memory_bytes),
            )
        self._points[point.samples] = point

    def overflowed(self, samples: int) -> None:
        """A probe ran out of memory."""
        self._probes += 1
        self.overflows += 1
        self._too_large = min(samples, self._too_large or samples)
        if self._points and samples <= self.points[-1].samples:
            # It fitted before, or a larger one did: that was luck, and no plan should count on it.
            self._refined = _MOST_REFINEMENTS
            least = min(self._points)
            self._points = {size: point for size, point in self._points.items() if size < samples or size == least}

    def next(self, left_s: float = math.inf, growing_left_s: float = 0.0) -> int | None:
        """The batch to measure next, within the time that is left, and left for growing; None when enough is known.

        No plan goes beyond the largest batch that was measured: growing may take longer than looking closer.
        """
        if not self._points:
            return None if self.overflows else self._least
        if self._probes >= _MOST_PROBES:
            return None
        grown = self._growth()
        # Where throughput has stopped to grow, larger batches are only a convenience, and may take less of the time.
        if grown and self.cost_s(grown) <= (left_s / 3 if self._is_flat() else max(left_s, growing_left_s)):
            return grown
        finer = self._refinement()
        return finer if finer and self.cost_s(finer) <= left_s else None

    def memory_at(self, samples: int) -> float:
        """What a larger batch than the largest so far is expected to need at the most."""
        last = self.points[-1]
        return last.memory_bytes + self._slope() * (samples - last.samples)

    def cost_s(self, samples: int) -> float:
        """How long a probe will take."""
        above = [point for point in self.points if point.samples >= samples]
        near = above[0] if above else self.points[-1]
        each = near.seconds * max(1.0, samples / near.samples)
        return 2 * each + (each if each > SLOW_S else 3 * max(each, WINDOW_S))

    def _growth(self) -> int | None:
        """The next larger batch, if there is any that is wanted and fits."""
        last = self.points[-1].samples
        # A rank that has no throughput to gain does not need larger batches, but stages 2 and 3 do, where ranks meet in
        # every micro-step; since plans do not go beyond what was measured, it goes on, in longer strides.
        wanted = min(self._most, last * (4 if self._is_flat() else 2))
        if self.overflows >= _MOST_OVERFLOWS:
            return None
        found = min(wanted, self._fitting())
        if self._too_large:
            found = min(found, (last + self._too_large) // 2)
        near = found < last * _CLOSE and found < self._most
        return None if found <= last or near else found

    def _fitting(self) -> int:
        """The largest batch that is expected to fit."""
        last, slope = self.points[-1], self._slope()
        left = self._room - last.memory_bytes
        if left <= 0:
            return last.samples
        more = left / slope if slope > 0 else math.inf
        if len(self._points) == 1 and self._dares:
            more = max(1, more)  # much of one sample's memory may be there with any number of them
        return min(self._most, last.samples + int(min(more, self._most)))

    def _slope(self) -> float:
        """Bytes that each further sample takes at the most: as of late or as on the whole, with a margin."""
        points = self.points
        if len(points) == 1:
            return points[0].memory_bytes / points[0].samples
        last = points[-1]
        return _MARGIN * max(
            (last.memory_bytes - other.memory_bytes) / (last.samples - other.samples)
            for other in (points[0], points[-2])
        )

    def _is_flat(self) -> bool:
        """Whether the last two doublings brought no throughput."""
        rates = [point.rate for point in self.points[-3:]]
        return len(rates) == 3 and rates[1] < rates[0] * _FLAT and rates[2] < rates[1] * _FLAT

    def _refinement(self) -> int | None:
        """Look again at the point that the others foretell worst, if one is foretold badly; or else beside it."""
        if self._refined >= _MOST_REFINEMENTS:
            return None
        tolerance = max(_TOLERANCE, 1.5 * self.noise)
        misses = {number: self._miss(number) for number in range(1, len(self._points))}
        far = sorted(
            (number for number in misses if abs(misses[number]) > tolerance), key=lambda each: -abs(misses[each])
        )
        # One that was held up makes its neighbours look quick, so it is looked at again before anything beside it.
        for number in far:
            samples = self.points[number].samples
            if misses[number] > 0 and samples not in self._checked:
                return samples
        return next((found for number in far if (found := self._beside(number))), None)

    def _miss(self, number: int) -> float:
        """By how much it took longer than the others foretell, as a part: by PCHIP, or the line of the last two."""
        points = self.points
        point = points.pop(number)
        if len(points) < 2:
            return 0.0
        if number == len(points):
            before, last = points[-2:]
            slope = (last.seconds - before.seconds) / (last.samples - before.samples)
            expected = last.seconds + slope * (point.samples - last.samples)
        else:
            curve = PchipInterpolator([each.samples for each in points], [each.seconds for each in points])
            expected = float(curve(point.samples))
        return (point.seconds - expected) / max(point.seconds, 1e-12)

    def _beside(self, number: int) -> int | None:
        """The middle of the wider interval that ends at this point."""
        sizes = [point.samples for point in self.points]
        sides = [(sizes[at], sizes[at + 1]) for at in (number - 1, number) if at + 1 < len(sizes)]
        wide = [(high / low, (low + high) // 2) for low, high in sides if high - low > 1 and high > low * _NARROW]
        return max(wide)[1] if wide else None
