"""Groups that train without waiting for each other, until a file `enough` lies where they would save."""

import os
import time
from pathlib import Path

import torch
from torch import nn

import mimatrix

enough = Path(os.environ["MIMATRIX_CHECKPOINTS"]) / "enough"
run = mimatrix.init(16, mode="hybrid")
torch.manual_seed(0)
rows = torch.randn(4096, 6)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
data = list(zip(rows, rows.sum(1, keepdim=True), strict=True))
model, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-2), data)
for _ in run.epochs(1_000_000):
    for inputs, wanted in loader:
        loss = nn.functional.mse_loss(model(inputs), wanted)
        run.backward(loss)
        run.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02 * (1 + run.status.group))
        if enough.exists():
            break
    if enough.exists():
        break
run.close()
