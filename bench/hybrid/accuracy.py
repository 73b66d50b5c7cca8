"""Accuracy of groups that do not wait, against all together: the same samples, the same seeds, in pairs.

Groups are threads of one process here, each with an engine of its own and real services behind real sockets; a slow one
sleeps. That stands in for processes under quotas, of which four with their services do not fit twenty seeds of eight ways
into an hour on two cores.
"""

import statistics
import threading
import time
from typing import Any

import torch
from scipy.stats import t as student
from torch import nn

from bench.hybrid.data import TASKS, Task
from bench.markdown import table
from mimatrix.collectives.shares import Shares
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.hybrid.layout import Layout
from mimatrix.hybrid.link import Link
from mimatrix.hybrid.member import Member
from mimatrix.hybrid.policies import Policy, policy
from mimatrix.hybrid.service import Service
from mimatrix.hybrid.shard import Shard

SPEEDS = (1.0, 1.0, 0.5, 0.25)
BATCH = 64
_STEP_S = 0.004
"""Of a group of speed 1, at least."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "large mini-batch": ("large", {}),
    "- without damping": ("large", {"damping": 0.0}),
    "- damping 0.5": ("large", {"damping": 0.5}),
    "- without momentum correction": ("large", {"corrects": False}),
    "plain asynchronous SGD": ("plain", {}),
    "bounded staleness (3)": ("bounded", {"most_ahead": 3}),
    "elastic averaging": ("elastic", {"local_steps": 4, "drawn": 0.2}),
    "local steps (10), outer SGD": ("local", {"local_steps": 10}),
}


class Town:
    """A service with one shard for each group, without mirrors."""

    def __init__(self, chosen: Policy, groups: int) -> None:
        self.policy, self._groups, self._lock = chosen, groups, threading.Lock()
        self._service: Service | None = None

    def connect(self, group: int, layout: Layout, row: torch.Tensor) -> Link:
        """The first group that comes makes it."""
        shares = Shares.equal(self._groups)
        with self._lock:
            if self._service is None:
                parts = torch.split(row, list(shares.cut(layout.count)))
                steppings = layout.steppings(shares, self.policy.outer)
                shards = {
                    number: Shard(parts[number], steppings[number], self.policy.rules) for number in range(self._groups)
                }
                self._service = Service(shards, "bench", say=print)
        return Link(group, layout.count, shares, [[self._service.place]] * self._groups, "bench")

    def close(self) -> None:
        """No more."""
        if self._service:
            self._service.close()


def trained(task: Task, seed: int, chosen: Policy, speeds: tuple[float, ...]) -> tuple[float, float, float]:
    """Accuracy of what the groups ended with, mean staleness, and seconds."""
    town = Town(chosen, len(speeds))
    models = [task.model(seed) for _ in speeds]
    found: list[tuple[float, float]] = []
    late: list[float] = []
    errors: list[BaseException] = []
    began = time.perf_counter()

    def group(number: int) -> None:
        try:
            accuracy, staleness = _group(task, seed, town, number, models[number], speeds[number])
            found.append((time.perf_counter(), accuracy))
            late.extend(staleness)
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=group, args=(number,)) for number in range(len(speeds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    town.close()
    if errors:
        raise errors[0]
    # Who ended last has what all have done.
    return max(found)[1], statistics.mean(late), time.perf_counter() - began


def _group(task: Task, seed: int, town: Town, number: int, net: nn.Module, speed: float) -> tuple[float, list[float]]:
    member = Member(lambda layout, row: town.connect(number, layout, row), town.policy, group=number)
    run = Run(Settings(global_batch=BATCH, seed=seed * 100 + number, quiet=True), outer=member)
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9)
    model, optimizer, loader = run.prepare(net, sgd, torch.utils.data.TensorDataset(*task.train))
    late: list[float] = []
    for _ in run.epochs(task.epochs):
        for inputs, targets in loader:
            started = time.perf_counter()
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            time.sleep(max(0.0, _STEP_S / speed - (time.perf_counter() - started)))
            optimizer.step()
            optimizer.zero_grad()
            late.append(member.staleness)
    run.close()
    return task.accuracy(model), late


def measured(seeds: int) -> dict[str, Any]:
    """By task and way: accuracy of all together, and how much each way loses."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"seeds": seeds}
    for name, make in TASKS.items():
        tasks = [make(seed) for seed in range(seeds)]
        together = [trained(task, seed, policy("large", BATCH, {}), (1.0,))[0] for seed, task in enumerate(tasks)]
        best = [task.best for task in tasks if task.best is not None]
        rows = {}
        for way, (chosen, options) in WAYS.items():
            runs = [trained(task, seed, policy(chosen, BATCH, options), SPEEDS) for seed, task in enumerate(tasks)]
            losses = [before - run[0] for before, run in zip(together, runs, strict=True)]
            mean, error = statistics.mean(losses), statistics.stdev(losses) / seeds**0.5
            rows[way] = {
                "accuracy": statistics.mean(run[0] for run in runs),
                "loss": mean,
                "bound": mean + float(student.ppf(0.95, seeds - 1)) * error,
                "staleness": statistics.mean(run[1] for run in runs),
                "seconds": statistics.mean(run[2] for run in runs),
            }
            print(name, way, {key: round(value, 2) for key, value in rows[way].items()}, flush=True)
        found[name] = {
            "together": statistics.mean(together),
            "best": statistics.mean(best) if best else None,
            "ways": rows,
        }
    return found


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
`python -m bench.hybrid`

The same number of samples in {found["seeds"]} pairs of runs with the same seeds. Groups are threads with real services behind real sockets, and slow
ones sleep: a stand-in for processes under quotas.

{chr(10).join(parts)}"""
