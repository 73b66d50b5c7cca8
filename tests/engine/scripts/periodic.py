"""Trains and never saves by itself: `periodic.py FOLDER EVERY [LOSE]` loses a worker in the first attempt if asked.

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

folder, every, loses = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)).double()
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
data = list(torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

run = mimatrix.init(global_batch=8, stage=2, timeout_s=20, quiet=True, checkpoint_every=every)
model, optimizer, loader, scheduler = run.prepare(model, optimizer, data, scheduler)
run.load(folder / "checkpoints")
total = run.user_state.get("total", 0.0)
run.register_user_state(lambda: {"total": total, "step": run.step})
assert run.user_state.get("step", 0) == run.step
for _ in run.epochs(4):
    for batch in loader:
        if loses and attempt == 0 and run.rank == 1 and run.step == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        run.backward(loss)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)
        total += optimizer.param_groups[0]["lr"]
if run.rank == 0:
    losses = {step: means["loss"] for step, means in run.history}
    (folder / f"losses-{attempt}.json").write_text(json.dumps([losses, total]))
