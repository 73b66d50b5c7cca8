"""What late pushes are worth: samples until an accuracy is reached, by staleness. `STALENESS_EXPONENT`.

Every push has its gradient at parameters that are t pushes old, and counts as the rules of `large` say; nothing else
differs. `python -m bench.hybrid.staleness`
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from support.hybrid_tasks import TASKS, Task
from torch import nn

from bench.markdown import table
from mimatrix.hybrid.policy import PushScaling
from mimatrix.hybrid.server.push_log import Push
from mimatrix.hybrid.server.shard import OptimizerSpec, ParamSpan, Shard
from mimatrix.planner.hybrid_price import STALENESS_EXPONENT, sample_worth

BATCH = 64
STALENESS = (0, 1, 3, 7)
_LOOKS = 10
"""Pushes between two looks at the accuracy."""
_WANTED = 0.99
"""Of the accuracy that is there after half of the epochs without staleness."""
_MOST = 12
"""Times the epochs of a task, after which it counts as not reached."""


def training_curve(task: Task, seed: int, late: int) -> Iterator[tuple[int, float]]:
    """Yield (samples, accuracy) from time to time, of pushes that all have the staleness `late`."""
    model = task.model(seed)
    values = [parameter.detach().flatten() for parameter in model.parameters()]
    pieces = tuple(ParamSpan(number, 0, part.numel()) for number, part in enumerate(values))
    stepping = OptimizerSpec(torch.optim.SGD, ({"lr": task.lr, "momentum": 0.9},), pieces)
    shard = Shard(torch.cat(values), stepping, PushScaling(reference=BATCH))
    known = deque([shard.pull()], maxlen=late + 1)
    inputs, targets = task.train
    generator, number = torch.Generator().manual_seed(seed), 0
    for _ in range(_MOST * task.epochs):
        for rows in torch.randperm(len(inputs), generator=generator)[: len(inputs) // BATCH * BATCH].view(-1, BATCH):
            old, number = known[0], number + 1
            _write(model, old.values)
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
            push = Push(group=0, number=number, samples=BATCH, nominal_samples=BATCH, base_version=old.version)
            shard.push(push, gradient)
            known.append(shard.pull())
            if number % _LOOKS == 0:
                _write(model, known[-1].values)
                yield number * BATCH, task.accuracy(model)


def samples_until(task: Task, seed: int, late: int, target: float) -> float:
    """Return the samples until an accuracy is reached, of pushes that all have the staleness `late`."""
    return next((samples for samples, accuracy in training_curve(task, seed, late) if accuracy >= target), math.inf)


def target_of(task: Task, seed: int) -> float:
    """Return the accuracy that stale pushes are to reach."""
    half = task.epochs * len(task.train[0]) // 2
    return _WANTED * max(
        accuracy for _, accuracy in takewhile(lambda each: each[0] <= half, training_curve(task, seed, 0))
    )


def _write(model: nn.Module, row: torch.Tensor) -> None:
    with torch.no_grad():
        sizes = [parameter.numel() for parameter in model.parameters()]
        for parameter, part in zip(model.parameters(), torch.split(row, sizes), strict=True):
            parameter.copy_(part.view_as(parameter))


def measure(seeds: int = 10) -> dict[str, Any]:
    """Return by task and staleness what a sample is worth, and the exponent that fits all of them best."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"seeds": seeds, "tasks": {}}
    points = []
    for name, make in TASKS.items():
        rows: dict[str, list[float]] = {str(late): [] for late in STALENESS}
        for seed in range(seeds):
            task = make(seed)
            target = target_of(task, seed)
            needed = {late: samples_until(task, seed, late, target) for late in STALENESS}
            for late, samples in needed.items():
                rows[str(late)].append(needed[0] / samples)
        usual = {late: statistics.median(each) for late, each in rows.items()}
        points += [
            (math.log(1 + int(late)), -math.log(each)) for late, each in usual.items() if late != "0" and each > 0
        ]
        figures["tasks"][name] = usual
        print(name, usual, flush=True)
    figures["exponent"] = sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return figures


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    rows = [[name, *(f"{usual[str(late)]:.2f}" for late in STALENESS)] for name, usual in figures["tasks"].items()]
    rows.append(["formula", *(f"{sample_worth(late):.2f}" for late in STALENESS)])
    headings = ["a sample is worth, of pushes that are late by", *map(str, STALENESS)]
    return f"""## What late pushes are worth
`python -m bench.hybrid.staleness`

Samples until 99 % of the accuracy that is there after half of the epochs without staleness, by those that late pushes need; medians of {figures["seeds"]} seeds.
The exponent that fits best is {figures["exponent"]:.2f}; the planner has {STALENESS_EXPONENT:g}.

{table(headings, rows)}"""


if __name__ == "__main__":
    print(section(measure()))
