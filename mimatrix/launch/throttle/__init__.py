"""Emulate slow workers: slow whole processes down from outside, whatever they run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.launch.throttle.cpu_quota import quotas
from mimatrix.launch.throttle.signals import pulse

METHODS = ("quota", "signals")


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How the slow ranks are slowed: the control groups that they join, or the pulse that they get."""

    method: str = ""
    joins: Mapping[int, Path] = field(default_factory=dict)
    pulses: Mapping[int, float] = field(default_factory=dict)

    def beside(self, groups: Mapping[str, int]) -> AbstractContextManager[None]:
        """Return what slows workers down while they run, given their process groups by rank."""
        slow = {rank: speed for rank, speed in self.pulses.items() if str(rank) in groups}
        return pulse({rank: groups[str(rank)] for rank in slow}, slow) if slow else nullcontext()


@contextmanager
def slow_down(speeds: Sequence[float], threads: int, method: str = "") -> Iterator[Slowdown]:
    """Slow each rank down to its speed while this lasts.

    Args:
        speeds: A fraction of full speed for each rank.
        threads: How many CPUs a worker uses at full speed; the quota of a slow one is a fraction of that.
        method: One of `METHODS`; the first that works if empty.
    """
    slow = {rank: speed for rank, speed in enumerate(speeds) if speed < 1}
    with ExitStack() as stack:
        if not slow:
            yield Slowdown()
            return
        if method != "signals":
            try:
                joins = stack.enter_context(quotas({rank: speed * threads for rank, speed in slow.items()}))
            except UserError:
                if method == "quota":
                    raise
            else:
                yield Slowdown("quota", joins=joins)
                return
        yield Slowdown("signals", pulses=slow)
