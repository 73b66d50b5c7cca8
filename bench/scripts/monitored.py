"""A job of bench.monitoring: trains with reports and without in turns, and writes medians of its steps."""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix
from mimatrix.engine.observers import OBSERVERS

STEPS = 400
out, turns = Path(sys.argv[1]), int(sys.argv[2])
reporter: Any = OBSERVERS[0].__self__  # type: ignore[attr-defined]
run = mimatrix.init(128, quiet=True)
net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
dataset = TensorDataset(torch.randn(128 * STEPS, 512), torch.randint(0, 10, (128 * STEPS,)))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Of one micro-batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


model, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), dataset, loss=loss_fn)
real = reporter._reported
found: dict[str, list[float]] = {"with": [], "without": []}
# The first two turns warm up.
for turn in run.epochs(2 * turns + 2):
    reporter._reported = (lambda _: 1.0) if turn % 2 else real
    steps = []
    for batch in loader:
        started = time.perf_counter()
        run.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - started)
    if turn > 1:
        found["without" if turn % 2 else "with"].append(statistics.median(steps))
reporter._reported = real
if run.rank == 0:
    out.write_text(json.dumps(found))
