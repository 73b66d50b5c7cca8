"""Train with reports and without in turns; write when steps ended, when reports were made and what they took."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix
from mimatrix.engine import run_hooks

STEPS = 200
out, turns = Path(sys.argv[1]), int(sys.argv[2])
reporter: Any = run_hooks._hooks[0].__self__  # type: ignore[attr-defined]
torch.set_num_threads(1)
run = mimatrix.init(128, quiet=True)
net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128 * STEPS, 512), torch.randint(0, 10, (128 * STEPS,)))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


model, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), dataset, loss=loss_fn)
real, is_on = reporter._send_report, True
reports: list[tuple[float, float, float]] = []


def timed_report(pause: float) -> float:
    """Send a report and record its time, or send none."""
    if not is_on:
        return pause or 1.0
    began_s, took_s = time.monotonic(), time.thread_time()
    again_s: float = real(pause)
    reports.append((began_s, time.monotonic(), time.thread_time() - took_s))
    return again_s


reporter._send_report = timed_report
found: dict[str, list[list[float]]] = {"with": [], "without": []}
# The first two turns warm up; then with, without, without, with and so on, so that drifts cancel.
for turn in run.epochs(2 * turns + 2):
    is_on = turn % 4 in (0, 3)
    marks = [time.monotonic()]
    for batch in loader:
        loss = loss_fn(model, batch)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        marks.append(time.monotonic())
    if turn > 1:
        found["with" if is_on else "without"].append(marks)
reporter._send_report = real
out.with_suffix(f".{run.rank}").write_text(json.dumps({**found, "reports": reports}))
