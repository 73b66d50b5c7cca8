"""Emulated slow workers: whole processes made slower from outside, whatever they run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.launch.throttle.cpu_quota import quotas
from mimatrix.launch.throttle.signals import pulsed

WAYS = ("quota", "signals")


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How the slow ranks are slowed: the control groups that they join, or the pulse that they get."""

    way: str = ""
    joins: Mapping[int, Path] = field(default_factory=dict)
    pulses: Mapping[int, float] = field(default_factory=dict)

    def beside(self, groups: Mapping[str, int]) -> AbstractContextManager[None]:
        """What is to go on beside the workers with these process groups, by their ranks."""
        slow = {rank: speed for rank, speed in self.pulses.items() if str(rank) in groups}
        return pulsed({rank: groups[str(rank)] for rank in slow}, slow) if slow else nullcontext()


@contextmanager
def slow_down(speeds: Sequence[float], threads: int, wish: str = "") -> Iterator[Slowdown]:
    """Slow each rank to its speed while this lasts: by `wish`, or by quotas where they can be had, or by signals.

    At full speed a worker may use `threads` processors, so the quota of a slow one is a part of that.
    """
    slow = {rank: speed for rank, speed in enumerate(speeds) if speed < 1}
    with ExitStack() as stack:
        if not slow:
            yield Slowdown()
            return
        if wish != "signals":
            try:
                joins = stack.enter_context(quotas({rank: speed * threads for rank, speed in slow.items()}))
            except UserError:
                if wish == "quota":
                    raise
            else:
                yield Slowdown("quota", joins=joins)
                return
        yield Slowdown("signals", pulses=slow)
