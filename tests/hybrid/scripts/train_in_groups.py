"""Groups of ranks that train apart: `train_in_groups.py OUT GROUPS EPOCHS [PAUSE_S [SAVES]]`.

Each group's first rank says when it has begun, and writes what it ended with. With SAVES, all go on from the last
checkpoint, and save after so many steps.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mimatrix

out, groups, epochs = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
pause_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
torch.set_default_dtype(torch.float64)
mode = "hybrid" if groups == "launcher" else mimatrix.Hybrid(groups=groups) if groups else "sync"
run = mimatrix.init(8, mode=mode, quiet=True, timeout_s=60)
torch.manual_seed(0)
rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = list(zip(rows, rows.sum(1, keepdim=True), strict=True))
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
sgd = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
model, optimizer, loader = run.prepare(net, sgd, data)
saves = int(sys.argv[5]) if len(sys.argv) > 5 else 0
if saves and run.load(out / "checkpoints") and run.rank == 0:
    with (out / f"{run.settings.seed}.loaded").open("a") as file:
        file.write(f"{run.step}\n")
losses = []
for _ in run.epochs(epochs):
    for inputs, wanted in loader:
        loss = nn.functional.mse_loss(model(inputs), wanted)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        losses.append(float(loss.detach()))
        time.sleep(pause_s)
        if saves and run.step % saves == 0:
            run.save(out / "checkpoints")
        if len(losses) == 10 and run.rank == 0:
            (out / f"{run.settings.seed}.begun").touch()
state = {name: value.flatten().tolist() for name, value in run.full_state_dict(model).items()}
if run.rank == 0:
    name = f"{run.settings.seed}.json"
    (out / f".{name}").write_text(json.dumps({"state": state, "steps": run.step, "losses": losses}))
    (out / f".{name}").rename(out / name)
run.close()
