"""How long one decision takes as jobs and devices grow in number: writes docs/measurements/scheduler_speed.md."""

import os
import random
import time
from dataclasses import dataclass
from statistics import median

from bench.markdown import machine, table, write_page
from mimatrix.scheduler import DeviceSlot, Queued, ResourceRequest, Running, Start, State, decide

REPEATS = 5
KINDS = {"a100": 4.0, "v100": 2.0, "RTX 3090": 1.5, "RTX 2080 Ti": 0.8}
WISHES = ("1", "1", "1", "2", "4", "8", "16", "a100:4", "v100:8", "3090:2", "2..8", "a100:8,v100:8", "64", "256")


@dataclass(frozen=True, slots=True)
class SchedulerCase:
    """A cluster and its queue."""

    name: str
    devices: int
    queued: int
    busy: float
    """The part of the devices that jobs have."""


CASES = [
    SchedulerCase("a lab, 8 devices, 20 jobs", 8, 20, 0.7),
    SchedulerCase("500 devices, 1,000 jobs, nearly full", 500, 1_000, 0.97),
    SchedulerCase("5,000 devices, 10,000 jobs, nearly full", 5_000, 10_000, 0.97),
    SchedulerCase("5,000 devices, 10,000 jobs, half empty", 5_000, 10_000, 0.5),
    SchedulerCase("5,000 devices, 10,000 jobs, all free", 5_000, 10_000, 0.0),
]


def state(case: SchedulerCase, seed: int) -> State:
    """Return nodes of one to eight devices of one kind in racks of 16, with jobs of up to 64 devices on the busy ones."""
    draw = random.Random(seed)
    devices: list[DeviceSlot] = []
    while len(devices) < case.devices:
        kind, node = draw.choice(list(KINDS)), len(devices)
        count = min(draw.choice((1, 2, 4, 8)), case.devices - len(devices))
        devices += [DeviceSlot(f"n{node}", number, kind, KINDS[kind], f"rack-{node // 64}") for number in range(count)]
    left, running = devices[: round(case.busy * len(devices))], list[Running]()
    while left:
        count = min(len(left), draw.choice((1, 1, 2, 4, 8, 64)))
        mine, left = left[:count], left[count:]
        priority, limit = draw.choice((20, 50, 80)), draw.choice((None, 3600.0, 36_000.0))
        running.append(
            Running(
                len(running),
                tuple(mine),
                draw.choice("abcdef"),
                priority,
                draw.uniform(0, 900),
                limit,
                preemptible=draw.random() < 0.5,
            )
        )
    queued = tuple(
        Queued(
            1_000_000 + number,
            ResourceRequest.parse(draw.choice(WISHES)),
            draw.choice("abcdef"),
            draw.choice((20, 50, 80)),
            draw.uniform(0, 900),
            draw.choice((None, 600.0, 7200.0)),
        )
        for number in range(case.queued)
    )
    return State(tuple(devices), queued, tuple(running), {user: draw.random() for user in "abcdef"})


def measure(case: SchedulerCase) -> list[str]:
    """Return a row of the page."""
    times, started = [], 0
    for seed in range(REPEATS):
        given = state(case, seed)
        began = time.perf_counter()
        found = decide(given, 1000.0)
        times.append(time.perf_counter() - began)
        started = sum(isinstance(each, Start) for each in found)
    spread = f"{min(times):.2f}-{max(times):.2f}"
    print(f"{case.name:45} {median(times):6.3f} s ({spread}), {started} started", flush=True)
    return [case.name, f"**{median(times):.3f}**", spread, str(started)]


def main() -> None:
    """Measure all cases on one core and write the page."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [measure(case) for case in CASES]
    write_page(
        "scheduler_speed.md",
        f"""# How long a decision takes

Made by `python -m bench.scheduler_speed` on one core ({machine()}): one call of the scheduler for the whole queue, with the reason of
every decision; medians of {REPEATS} states drawn at random, and their spread.

{table(["cluster and queue", "decision [s]", "spread", "jobs started"], rows)}
Devices are of four kinds on nodes of one to eight, in racks; jobs ask for one to 256 devices, some of a kind, some elastic; half of the
running jobs may be preempted.
""",
    )


if __name__ == "__main__":
    main()
