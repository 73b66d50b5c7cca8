"""Trains in float64 and writes every loss beside the checkpoints, so that two runs can be compared."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mimatrix

steps, pause = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
rows = torch.randn(steps * 12, 6)
data = list(zip(rows, rows.sum(1, keepdim=True), strict=True))
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
adam = torch.optim.Adam(net.parameters(), lr=1e-2)
run = mimatrix.init(global_batch=12, quiet=True)
decay = torch.optim.lr_scheduler.StepLR(adam, 5, 0.9)
model, optimizer, loader, scheduler = run.prepare(net, adam, data, decay)
losses = {}
out = Path(os.environ["MIMATRIX_CHECKPOINTS"]).with_suffix(".losses")
if run.rank == 0 and out.is_file():
    losses = {int(step): loss for step, loss in json.loads(out.read_text()).items() if int(step) < run.step}
try:
    for _ in run.epochs(1):
        for inputs, wanted in loader:
            loss = nn.functional.mse_loss(model(inputs), wanted)
            run.backward(loss)
            run.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            time.sleep(pause)
finally:
    if run.rank == 0:
        losses |= {step: means["loss"] for step, means in run.history}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(losses))
print("trained", run.step, flush=True)
