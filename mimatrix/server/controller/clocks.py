"""Times of a job are measured by a monotonic clock; wall time is only stored and shown, and may jump."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)
JUMP_S = 3600.0
"""A wall clock that moves by more than this against other evidence has jumped."""
PAUSE_S = 86_400.0
"""After a jump nothing is deleted for this time, so that a wrong clock can be noticed and set right."""

_Key = tuple[str, int, float]


class JobClock:
    """Translates stored wall times of jobs to monotonic times, once each, so that later jumps do not move them."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._instants: dict[_Key, float] = {}
        self._used: set[_Key] = set()
        self._known_s: float | None = None

    def now_s(self) -> float:
        """Return monotonic time."""
        return self._monotonic()

    def distrust_before(self, newest_s: float) -> None:
        """Take the newest stored time as the wall time of this start: the clock has jumped since, or so it seems."""
        self._known_s = newest_s

    def trust(self) -> None:
        """Take the wall clock for what is seen for the first time from now on."""
        self._known_s = None

    def instant(self, what: str, job: int, wall_s: float) -> float:
        """Return the monotonic time of something that was stored with `wall_s`; what is in the future is now."""
        key = (what, job, wall_s)
        self._used.add(key)
        if key not in self._instants:
            wall_now_s = self._clock() if self._known_s is None else self._known_s
            self._instants[key] = self._monotonic() - max(0.0, wall_now_s - wall_s)
        return self._instants[key]

    def forget_unused(self) -> None:
        """Drop what was not asked for since the last call."""
        self._instants = {key: value for key, value in self._instants.items() if key in self._used}
        self._used = set()


class ClockGuard:
    """Notices jumps of the wall clock: against the newest stored row at the start, then against monotonic time."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._offset_s: float | None = None
        self._paused_until_s = float("-inf")

    def begin(self, newest_s: float | None) -> bool:
        """Compare with the newest stored time; return whether the clock has jumped since, or the server was down."""
        self._offset_s = self._clock() - self._monotonic()
        moved_s = 0.0 if newest_s is None else self._clock() - newest_s
        return self._judge(moved_s, "the newest stored row")

    def check(self) -> bool:
        """Return whether old rows and files may be deleted now."""
        offset_s = self._clock() - self._monotonic()
        moved_s = 0.0 if self._offset_s is None else offset_s - self._offset_s
        if self._judge(moved_s, "the monotonic clock") or self._offset_s is None:
            self._offset_s = offset_s
        return self._monotonic() >= self._paused_until_s

    def _judge(self, moved_s: float, against: str) -> bool:
        if abs(moved_s) <= JUMP_S:
            return False
        self._paused_until_s = self._monotonic() + PAUSE_S
        logger.warning(
            "the clock moved by %.0f s against %s; nothing is deleted for a day: check the time of this machine",
            moved_s,
            against,
        )
        return True
