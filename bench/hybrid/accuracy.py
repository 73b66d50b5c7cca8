"""Accuracy of groups that do not wait, against all together: the same samples, the same seeds, in pairs."""

import statistics
import time
from dataclasses import replace
from typing import Any

from scipy.stats import t as student
from support.hybrid_tasks import TASKS, train_together

from bench.hybrid.group_processes import Town, Wanted
from bench.markdown import table

SPEEDS = (1.0, 1.0, 0.5, 0.25)
CPUS = 0.6
"""Of a group of speed 1."""
BATCH = 64
_SCALED: dict[str, Any] = {"reference": BATCH, "warm_up": 20 * BATCH, "momentum_correction": True}
WAYS: dict[str, Wanted] = {
    "large mini-batch": Wanted("", 0),
    "- without damping": Wanted("", 0, options={"staleness_exponent": 0.0}),
    "- with momentum that keeps its size": Wanted("", 0, options={"momentum_correction": True}),
    "large mini-batch, twice as large, momentum keeps its size": Wanted("", 0, options=_SCALED, batch=2 * BATCH),
    "- without scaling": Wanted("", 0, options={**_SCALED, "lr_scaling": False}, batch=2 * BATCH),
    "- without warm-up": Wanted("", 0, options={**_SCALED, "warm_up": 0}, batch=2 * BATCH),
    "plain asynchronous SGD": Wanted("", 0, "plain"),
    "bounded staleness (3)": Wanted("", 0, "bounded", {"max_staleness": 3}),
}


def measured(seeds: int, first: int = 0, ways: tuple[str, ...] = tuple(WAYS)) -> dict[str, Any]:
    """By task and way: accuracy of all together, and how much each way loses."""
    found: dict[str, Any] = {"seeds": seeds}
    with Town(tuple(CPUS * speed for speed in SPEEDS)) as town:
        for name, make in TASKS.items():
            numbers = range(first, first + seeds)
            base = [train_together(TASKS[name](seed), seed, BATCH) for seed in numbers]
            best = [limit for seed in numbers if (limit := make(seed).best) is not None]
            rows = {}
            for way in ways:
                rows[way] = _row(town, replace(WAYS[way], task=name), numbers, base)
                print(name, way, {key: round(value, 2) for key, value in rows[way].items()}, flush=True)
            found[name] = {
                "together": statistics.mean(base),
                "best": statistics.mean(best) if best else None,
                "ways": rows,
            }
    return found


def _row(town: Town, wanted: Wanted, seeds: range, base: list[float]) -> dict[str, float]:
    began = time.monotonic()
    runs = [town.trained(replace(wanted, seed=seed)) for seed in seeds]
    seconds = time.monotonic() - began
    # Who ended last has what all have done.
    losses = [before - run[-1].accuracy for before, run in zip(base, runs, strict=True)]
    mean, error = statistics.mean(losses), statistics.stdev(losses) / len(seeds) ** 0.5
    return {
        "accuracy": statistics.mean(run[-1].accuracy for run in runs),
        "loss": mean,
        "bound": mean + float(student.ppf(0.95, len(seeds) - 1)) * error,
        "staleness": statistics.mean(each.staleness for run in runs for each in run),
        "seconds": seconds / len(seeds),
    }


def section(found: dict[str, Any]) -> str:
    """For the page."""
    parts = []
    for name in TASKS:
        task = found[name]
        limit = f"; nobody can do better than {task['best']:.2f} %" if task["best"] else ""
        rows = [
            [way, f"{row['accuracy']:.2f}", f"{row['loss']:+.2f}", f"{row['bound']:+.2f}", f"{row['staleness']:.1f}"]
            for way, row in task["ways"].items()
        ]
        headings = ["four groups of speeds 1, 1, 0.5, 0.25", "accuracy [%]", "lost [points]", "95 % bound", "staleness"]
        parts.append(f"**{name}**, all together {task['together']:.2f} %{limit}:\n\n{table(headings, rows)}")
    return f"""## Accuracy
`python -m bench.hybrid accuracy`

The same number of samples in {found["seeds"]} pairs of runs with the same seeds; synchronous steps have {BATCH} samples, and so have pushes if nothing else is said. Every group is
a process under a quota (1 is {CPUS} of a processor), the service is a process beside them. *Lost*: the mean over pairs, and below what it lies with 95 %.
Wanted is a bound below 0.5. The rules as they are by themselves (*large mini-batch*) keep it in both sets. Of two runs of all this, this is the second, in which pushes
were a third later. Pushes that are twice as large as the batch that the learning rate was chosen for, scaled and warmed up, kept it in the first (bounds
of 0.27 and 0.12) and nearly in the second; momentum that keeps its size when the factor changes lost more in the first (0.76), and nothing in the second. Without damping, and so with plain
asynchronous SGD, the harder set loses a point, and where pushes are 3.5 late some runs of digits go astray altogether; bounded staleness prevents that.

{chr(10).join(parts)}"""
