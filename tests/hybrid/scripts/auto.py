"""A rank that lets the mode be chosen: `auto.py OUT`. Writes what was chosen and what it ended with."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import mimatrix

torch.set_num_threads(1)
torch.manual_seed(0)
run = mimatrix.init(128, mode="auto", timeout_s=60)
rows = torch.randn(512, 6, generator=torch.Generator().manual_seed(1))
data = list(zip(rows, rows.sum(1, keepdim=True), strict=True))
net = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
sgd = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


model, optimizer, loader = run.prepare(net, sgd, data, loss=loss_of)
assert run.plan
because, losses = run.plan.reasons[0], []
for _ in run.epochs(20):
    for batch in loader:
        loss = loss_of(model, batch)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
choice = run.mode_choice
assert choice
told = {"mode": run.status.mode, "reason": choice.reason, "because": because, "ranks": run.world_size, "losses": losses}
(Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
run.close()
