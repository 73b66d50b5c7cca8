"""Trains, saves after every epoch, and loses a worker once if asked: `interrupted.py FOLDER [LOSE]`.

Rank 0 leaves the losses of this attempt, by step, in FOLDER/losses-ATTEMPT.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import mimatrix

folder, loses = Path(sys.argv[1]), len(sys.argv) > 2
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = list(torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

run = mimatrix.init(global_batch=8, stage=2, timeout_s=20, quiet=True)
model, optimizer, loader = run.prepare(model, optimizer, data)
run.load(folder / "checkpoints")
for _ in run.epochs(4):
    for batch in loader:
        if loses and attempt == 0 and run.rank == 1 and run.step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        run.backward(loss)
        optimizer.step()
        run.log(loss=loss)
    run.save(folder / "checkpoints", wait=True)
if run.rank == 0:
    losses = {step: means["loss"] for step, means in run.history}
    (folder / f"losses-{attempt}.json").write_text(json.dumps(losses))
