"""Which micro-batch size to measure next, and when to stop: results go in, the next size comes out; no device here.

The search first doubles the size, up to the largest one that is useful or fits into memory. Then it refines where the
measured points do not predict each other. If time is short, refinement ends first.
"""

import math
from dataclasses import dataclass, replace

from scipy.interpolate import PchipInterpolator

_MAX_PROBES = 24
_MAX_REFINEMENTS = 8
_MAX_OOMS = 2
"""Stop growing after this many: the limit is known well enough, and running out of memory is risky."""
_MARGIN = 1.15
"""How much faster than before memory may grow."""
_CLOSE = 1.05
"""The largest size that fits is known if the next candidate is not larger than this factor."""
_FLAT = 1.02
"""Throughput that grows by less than this factor from one doubling to the next has stopped growing."""
_TOLERANCE = 0.03
_NARROW = 1.1
"""Do not refine between points closer than this factor."""
WINDOW_S = 0.06
SLOW_S = 1.0
"""A pass that takes at least this long is timed once."""


@dataclass(frozen=True, slots=True)
class ProbedBatch:
    """The result of measuring micro-batches of `samples`."""

    samples: int
    seconds: float
    memory_bytes: float
    noise: float = 0.0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / max(self.seconds, 1e-12)


class BatchSizeSearch:
    """The search over micro-batches of `min_samples` to `max_samples` that need at most `available_bytes`.

    Args:
        max_samples: No larger micro-batch is useful.
        available_bytes: Memory for activations.
        min_samples: The smallest micro-batch that the model accepts.
        may_oom: Whether running out of memory does no harm, so that a size may be tried on a guess. A GPU raises an
            error; a process on a CPU is killed.
    """

    def __init__(self, max_samples: int, available_bytes: float, min_samples: int = 1, *, may_oom: bool = True) -> None:
        assert 1 <= min_samples <= max_samples, f"batches of {min_samples} to {max_samples}"
        self._min_samples, self._max_samples = min_samples, max_samples
        self._available_bytes, self._may_oom = available_bytes, may_oom
        self._points: dict[int, ProbedBatch] = {}
        self._too_large: int | None = None
        self.oom_count = 0
        self._probes = self._refinements = 0
        self._rechecked: set[int] = set()

    @property
    def points(self) -> list[ProbedBatch]:
        """All measured points, the smallest batch first."""
        return [self._points[samples] for samples in sorted(self._points)]

    @property
    def noise(self) -> float:
        """The median over points of how much times differ between runs, as a fraction."""
        noises = sorted(point.noise for point in self._points.values())
        return noises[len(noises) // 2] if noises else 0.0

    def add(self, point: ProbedBatch) -> None:
        """Add a measured point; if the size was measured before, keep the shorter time.

        Other processes can only make a measurement slower.
        """
        self._probes += 1
        if self._points and point.samples <= self.points[-1].samples:
            self._refinements += 1
        before = self._points.get(point.samples, point)
        if before is not point:
            self._rechecked.add(point.samples)
            point = replace(
                min(before, point, key=lambda either: either.seconds),
                memory_bytes=max(before.memory_bytes, point.memory_bytes),
            )
        self._points[point.samples] = point

    def add_oom(self, samples: int) -> None:
        """Note that micro-batches of `samples` ran out of memory."""
        self._probes += 1
        self.oom_count += 1
        self._too_large = min(samples, self._too_large or samples)
        if self._points and samples <= self.points[-1].samples:
            # This size or a larger one fitted before. That was luck, and no plan should count on it.
            self._refinements = _MAX_REFINEMENTS
            least = min(self._points)
            self._points = {size: point for size, point in self._points.items() if size < samples or size == least}

    def next(self, left_s: float = math.inf, growing_left_s: float = 0.0) -> int | None:
        """Return the size to measure next, or None if enough is known or time is up.

        No plan goes beyond the largest measured size, so growing may take longer than refining.

        Args:
            left_s: Time left.
            growing_left_s: Time left for larger sizes.
        """
        if not self._points:
            return None if self.oom_count else self._min_samples
        if self._probes >= _MAX_PROBES:
            return None
        larger = self._next_larger()
        # Once throughput has stopped growing, larger batches are only a convenience and may take less of the time.
        if larger and self.cost_s(larger) <= (left_s / 3 if self._is_flat() else max(left_s, growing_left_s)):
            return larger
        finer = self._next_refinement()
        return finer if finer and self.cost_s(finer) <= left_s else None

    def memory_at(self, samples: int) -> float:
        """Return an upper estimate of the memory of a size beyond the largest measured one."""
        last = self.points[-1]
        return last.memory_bytes + self._slope() * (samples - last.samples)

    def cost_s(self, samples: int) -> float:
        """Estimate how long it takes to measure a size."""
        above = [point for point in self.points if point.samples >= samples]
        near = above[0] if above else self.points[-1]
        pass_s = near.seconds * max(1.0, samples / near.samples)
        return 2 * pass_s + (pass_s if pass_s > SLOW_S else 3 * max(pass_s, WINDOW_S))

    def _next_larger(self) -> int | None:
        """Return the next larger size that is useful and fits, if there is one."""
        last = self.points[-1].samples
        # A rank without throughput to gain does not need larger batches. ZeRO stages 2 and 3 do, since ranks
        # communicate in every micro-step, and plans do not go beyond what was measured. So take longer strides.
        wanted = min(self._max_samples, last * (4 if self._is_flat() else 2))
        if self.oom_count >= _MAX_OOMS:
            return None
        samples = min(wanted, self._largest_fitting())
        if self._too_large:
            samples = min(samples, (last + self._too_large) // 2)
        is_close = samples < last * _CLOSE and samples < self._max_samples
        return None if samples <= last or is_close else samples

    def _largest_fitting(self) -> int:
        """Return the largest size that is expected to fit."""
        last, slope = self.points[-1], self._slope()
        left = self._available_bytes - last.memory_bytes
        if left <= 0:
            return last.samples
        more = left / slope if slope > 0 else math.inf
        if len(self._points) == 1 and self._may_oom:
            more = max(1, more)  # much of the memory of one sample may not depend on the number of samples
        return min(self._max_samples, last.samples + int(min(more, self._max_samples)))

    def _slope(self) -> float:
        """Return the bytes per further sample: the larger of the latest and the overall growth, with a margin."""
        points = self.points
        if len(points) == 1:
            return points[0].memory_bytes / points[0].samples
        last = points[-1]
        return _MARGIN * max(
            (last.memory_bytes - other.memory_bytes) / (last.samples - other.samples)
            for other in (points[0], points[-2])
        )

    def _is_flat(self) -> bool:
        """Tell whether the last two doublings brought no throughput."""
        rates = [point.rate for point in self.points[-3:]]
        return len(rates) == 3 and rates[1] < rates[0] * _FLAT and rates[2] < rates[1] * _FLAT

    def _next_refinement(self) -> int | None:
        """Return the size to check again or to add next to the point that the others predict worst, if any."""
        if self._refinements >= _MAX_REFINEMENTS:
            return None
        tolerance = max(_TOLERANCE, 1.5 * self.noise)
        errors = {index: self._prediction_error(index) for index in range(1, len(self._points))}
        poor = sorted(
            (index for index in errors if abs(errors[index]) > tolerance), key=lambda index: -abs(errors[index])
        )
        # A point that was disturbed makes its neighbours look fast, so measure it again first.
        for index in poor:
            samples = self.points[index].samples
            if errors[index] > 0 and samples not in self._rechecked:
                return samples
        return next((middle for index in poor if (middle := self._between(index))), None)

    def _prediction_error(self, index: int) -> float:
        """Return how much longer than predicted a point took, as a fraction: by PCHIP, or by the last two points."""
        points = self.points
        point = points.pop(index)
        if len(points) < 2:
            return 0.0
        if index == len(points):
            before, last = points[-2:]
            slope = (last.seconds - before.seconds) / (last.samples - before.samples)
            expected = last.seconds + slope * (point.samples - last.samples)
        else:
            curve = PchipInterpolator([other.samples for other in points], [other.seconds for other in points])
            expected = float(curve(point.samples))
        return (point.seconds - expected) / max(point.seconds, 1e-12)

    def _between(self, index: int) -> int | None:
        """Return the middle of the wider interval that ends at a point, unless both are narrow."""
        sizes = [point.samples for point in self.points]
        sides = [(sizes[at], sizes[at + 1]) for at in (index - 1, index) if at + 1 < len(sizes)]
        wide = [(high / low, (low + high) // 2) for low, high in sides if high - low > 1 and high > low * _NARROW]
        return max(wide)[1] if wide else None
