"""How long planning takes on one core as devices grow in number and in kind: writes docs/measurements/planner_speed.md."""

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from bench.markdown import machine, table, write_page
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import FixedCommunication, Problem
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.planner import make_plan

REPEATS = 3
GB = 10**9
MODEL = ModelSize("gpt", "gpt", 1_300_000_000, 26 * GB // 10, 26 * GB // 10, 156 * GB // 10, GB // 20)
"""1.3 billion parameters in half precision, with Adam."""


@dataclass(frozen=True, slots=True)
class PlannerCase:
    """Devices and a global batch."""

    name: str
    devices: int
    kinds: int
    global_batch: int
    rooms_gb: tuple[float, ...]
    sizes: int = 64
    """The largest micro-batch that was measured."""
    optimizer_gb: float = 15.6
    """What the optimizer keeps; where it fills the memory, room for samples and room for states are traded."""


CASES = [
    PlannerCase("8 devices", 8, 4, 1_024, (24, 40, 80)),
    PlannerCase("64 devices", 64, 4, 65_536, (24, 40, 80)),
    PlannerCase("1,024 devices of 4 kinds", 1_024, 4, 1_000_000, (24, 40, 80)),
    PlannerCase("1,024 devices, all different", 1_024, 1_024, 1_000_000, (24, 40, 80)),
    PlannerCase("1,024 of 4 kinds, micro-batches up to 512", 1_024, 4, 1_000_000, (60, 100, 200), 512),
    PlannerCase("3 devices, micro-batches up to 16,384", 3, 3, 16_384, (5_000,), 16_384),
    PlannerCase("16 devices, micro-batches up to 65,536", 16, 16, 1_000_000, (20_000,), 65_536),
    PlannerCase("8 devices, memory short", 8, 4, 1_024, (3.6, 5, 8)),
    PlannerCase("1,024 devices, all different, memory short", 1_024, 1_024, 1_000_000, (5.6, 6, 9)),
    PlannerCase("16 devices, filled by states", 16, 16, 16_384, (8, 9, 10), optimizer_gb=16 * 1.5),
    PlannerCase(
        "1,024 devices of 4 kinds, filled by states", 1_024, 4, 1_000_000, (8, 9, 10), optimizer_gb=1_024 * 1.5
    ),
    PlannerCase(
        "1,024, all different, filled by states", 1_024, 1_024, 1_000_000, (8, 9, 10), optimizer_gb=1_024 * 1.5
    ),
]


def problem(case: PlannerCase, seed: int) -> Problem:
    """Return devices whose times have a fixed part and a knee, up to ten times as fast as one another."""
    draw = random.Random(seed)
    kinds = [_profile(draw, case) for _ in range(case.kinds)]
    profiles = tuple(kinds[rank % case.kinds] for rank in range(case.devices))
    paid = Communication.of(0.2, 0.1, 0.1)
    names = tuple(profile.device for profile in profiles)
    model = replace(MODEL, optimizer_bytes=round(case.optimizer_gb * GB))
    return Problem(
        global_batch=case.global_batch,
        model=model,
        profiles=profiles,
        names=names,
        communication=FixedCommunication(paid),
    )


def _profile(draw: random.Random, case: PlannerCase) -> Profile:
    speed = draw.uniform(1, 10)
    knee = draw.randint(4, 32)
    sizes = sorted({1, 2, 3, 4, 6, *(2**power for power in range(3, 17) if 2**power <= case.sizes), case.sizes})
    seconds = [(size, (0.02 + 0.01 * max(size, knee) + 0.002 * knee) / speed) for size in sizes]
    memory = [(size, (0.2 + 0.25 * size) * GB) for size in sizes]
    room = round(draw.choice(case.rooms_gb) * draw.uniform(0.9, 1.1) * GB)
    return Profile(
        f"gpu {speed:.3f}", "gpt", Curve.of(seconds), Curve.of(memory), room, 0.4 / speed, (0.0, 0.0, 0.001, 0.002)
    )


def time_plan(make: Callable[[], Problem]) -> tuple[float, Plan]:
    """Time one plan from measured points, with nothing cached."""
    asked = make()
    started = time.perf_counter()
    plan = make_plan(asked)
    return time.perf_counter() - started, plan


def measure(case: PlannerCase) -> list[str]:
    """Return a row of the page."""
    found = [time_plan(lambda seed=seed: problem(case, seed)) for seed in range(REPEATS)]  # type: ignore[misc]
    times = [taken for taken, _ in found]
    within = max(plan.within for _, plan in found)
    stages = "/".join(str(plan.stage) for _, plan in found)
    print(f"{case.name:60} {median(times):6.2f} s  within {within:.2%}  stages {stages}", flush=True)
    spread = f"{min(times):.2f}-{max(times):.2f}"
    return [case.name, f"{case.global_batch:,}", f"**{median(times):.2f}**", spread, stages, f"{within:.2%}"]


def main() -> None:
    """Measure all cases on one core and write the page."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    time_plan(lambda: problem(CASES[0], 0))  # loads what is loaded late
    rows = [measure(case) for case in CASES]
    headings = ["devices", "global batch", "all stages [s]", "spread", "chosen", "proven within"]
    write_page(
        "planner_speed.md",
        f"""# How long planning takes

Made by `python -m bench.planner_speed` on one core ({machine()}); the medians of {REPEATS} clusters
drawn at random, and their spread. From measured points to the finished plan: curves, all four stages priced, reasons. *Proven within* is the
largest distance from the optimum of the cost model that the search could not rule out.

{table(headings, rows)}
Times have a fixed part and a knee; devices are up to ten times as fast as one another. Up to 64 devices the search also
looks for those that the job would be better off without, and plans again without each kind or set that could be worth it.
""",
    )


if __name__ == "__main__":
    main()
