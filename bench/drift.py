"""`python -m bench.drift` (root): how soon the batch follows a worker that drops from full speed to 0.3 in mid-run.

Its quota is rewritten from outside. A run without the drop gives the losses to compare with.
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.heterogeneous.page import DRIFT, keep, write
from bench.heterogeneous.rounds import IDEAL, OURS
from bench.heterogeneous.tasks import TrainingTask, folder, losses, train, train_in
from mimatrix.core.errors import UserError
from mimatrix.launch.throttle.cpu_quota import PREFIX
from mimatrix.processes.cgroups import cpu_cgroups

SLOWED, FULL, SLOW = 1, 0.999, 0.3
"""Which rank; just below 1, so that it has a control group from the start; what is left to it."""
BEFORE, AFTER = 20, 50
WITHIN, PART, LASTING = 20, 0.9, 5
_POLL_S, _WATCHED_S = 0.02, 600.0


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    kept: Annotated[bool, typer.Option("--keep", help="Write the figures and the page to docs/measurements.")] = False,
) -> None:
    """Train twice, once with the drop; fail if the throughput is not back in time or a loss differs."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        task = TrainingTask(OURS, (1.0, FULL), double=True, warm_up=BEFORE, most=AFTER, seconds=1e9)
        figures = measure(task, status.update)
    if kept:
        keep(DRIFT, figures)
        write()
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        _print(figures)
    sys.exit(_failure(figures))


def measure(task: TrainingTask, show: Callable[[str], None]) -> dict[str, Any]:
    """Return samples per second of every step, when the drop and the recovery came, and how much losses differ."""
    show("training undisturbed")
    undisturbed = losses(train(task), task.global_batch)
    show("measuring the ideals")
    before, after = (_ideal(task, speed) for speed in (FULL, SLOW))
    show("training with the drop")
    with folder() as place, _drop_quota(place) as drops:
        records = train_in(task, place)
    show("measuring the ideal again")
    # On both sides of the run, since the machine may have other things to do.
    after = (after + _ideal(task, SLOW)) / 2
    disturbed = losses(records, task.global_batch)
    ends = records[0].ends_s
    rates = [task.global_batch / (end - start) for start, end in pairwise(ends)]
    drop = drop_index(ends, drops[0])
    return {
        "samples_per_s": rates,
        "ideal_before": before,
        "ideal_after": after,
        "dropped_at": drop,
        "recovered_at": recovery_index(rates, drop, PART * after),
        "loss_apart": max(abs(one - other) for one, other in zip(disturbed, undisturbed, strict=True)),
        "plan": records[0].plan,
    }


def drop_index(ends_s: Sequence[float], drop_s: float) -> int:
    """Return the number of the rate during whose step the drop came: rate n is that of step n + 1."""
    return next(number for number, end in enumerate(ends_s) if end > drop_s) - 1


def recovery_index(rates: Sequence[float], drop: int, wanted: float) -> int | None:
    """Return the first step after the drop from which the median of several rates reaches `wanted`."""
    for first in range(drop + 1, len(rates) - LASTING + 1):
        if rates[first] >= wanted and statistics.median(rates[first : first + LASTING]) >= wanted:
            return first
    return None


def _ideal(task: TrainingTask, speed: float) -> float:
    alone = replace(task, who=IDEAL, speeds=(1.0, speed), seconds=6.0)
    return sum(record.rate for record in train(alone))


@contextmanager
def _drop_quota(place: Path) -> Iterator[list[float]]:
    """Rewrite the quota once rank 0 has ended its first steps; yield the times at which that happened."""
    drops: list[float] = []
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(place / "last", drops, over), name="drop")
    thread.start()
    try:
        yield drops
    finally:
        over.set()
        thread.join()


def _watch(told: Path, drops: list[float], over: threading.Event) -> None:
    deadline = time.monotonic() + _WATCHED_S
    while not over.wait(_POLL_S) and time.monotonic() < deadline:
        if told.is_file():
            groups = cpu_cgroups()
            assert groups
            (group,) = (path for path in groups.find(f"{PREFIX}{os.getpid()}-") if path.name.endswith(f"-{SLOWED}"))
            groups.add(group.name, SLOW)
            drops.append(time.monotonic())
            return


def _failure(figures: dict[str, Any]) -> str | int:
    drop, back = figures["dropped_at"], figures["recovered_at"]
    if back is None or back - drop > WITHIN:
        return f"throughput was not back at {PART} of the new ideal within {WITHIN} steps of step {drop}"
    return f"losses differ by {figures['loss_apart']:.1e}" if figures["loss_apart"] > 1e-10 else 0


def _print(figures: dict[str, Any]) -> None:
    drop, back = figures["dropped_at"], figures["recovered_at"]
    for number, rate in enumerate(figures["samples_per_s"]):
        ideal = figures["ideal_before"] if number < drop else figures["ideal_after"]
        mark = {drop: "  the drop", back: "  recovered"}.get(number, "")
        print(f"step {number:3}  {rate:7.0f} samples/s  {rate / ideal:.2f} of the ideal{mark}")
    later = f"{back - drop} steps later" if back is not None else "never"
    print(f"dropped at step {drop}, recovered {later}; losses differ by {figures['loss_apart']:.1e} at the most")


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"mimatrix: {error}")
