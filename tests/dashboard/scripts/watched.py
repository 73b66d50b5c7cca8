"""Trains and saves until it is told to end; its second rank is slow while a file `slow` lies where it saves."""

import os
import time
from pathlib import Path

import torch
from torch import nn

import mimatrix

EVERY = 40
folder = Path(os.environ["MIMATRIX_CHECKPOINTS"])
torch.manual_seed(0)
rows = torch.randn(1200, 6)
data = list(zip(rows, rows.sum(1, keepdim=True), strict=True))
net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
run = mimatrix.init(global_batch=12)
model, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), data)
for _ in run.epochs(1_000_000):
    for inputs, wanted in loader:
        loss = nn.functional.mse_loss(model(inputs), wanted)
        time.sleep(0.1 if run.rank == 1 and (folder / "slow").is_file() else 0.02)
        run.backward(loss)
        run.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if run.step % EVERY == 0:
            run.save(folder, keep=2)
            if run.rank == 0:
                print("saved at step", run.step, flush=True)
