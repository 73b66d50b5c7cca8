"""Train digits and take snapshots of the parameters: `to_target.py MODE EPOCHS SEED FOLDER`.

Every rank writes into FOLDER which process it is, and waits for the file `slowed`; then that it is ready, and waits for `go`.
The snapshots of rank 0 are evaluated afterwards, so that evaluating takes no time from training.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from support.hybrid_tasks import digits
from torch import nn

import mimatrix

BATCH, NOTED, PATIENCE_S = 64, 4, 120.0
WORK = 16
mode, epochs, seed, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
me = os.environ.get("RANK", "0")
torch.set_num_threads(1)


def exchange(what: str, awaited: str) -> None:
    """Write a message, and wait for an answer."""
    (folder / f"{what}-{me}").write_text(str(os.getpid()))
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / awaited).exists():
        if time.monotonic() > deadline:
            sys.exit(f"the file {awaited} did not appear within {PATIENCE_S:g} s")
        time.sleep(0.01)


exchange("pid", "slowed")
if mode != "sync":
    run = mimatrix.init(BATCH, mode="hybrid", seed=seed, quiet=True)
else:
    run = mimatrix.init(BATCH, plan="online", seed=seed, quiet=True)
task = digits(seed)
net = task.model(seed)
frozen = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch; a frozen net computes as well, so that a step is mostly computing."""
    with torch.no_grad():
        for _ in range(WORK):
            frozen(batch[0])
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9)
model, optimizer, loader = run.prepare(net, sgd, torch.utils.data.TensorDataset(*task.train), loss=loss_fn)
exchange("ready", "go")
noted: list[tuple[float, dict[str, torch.Tensor]]] = []
began, steps = time.monotonic(), 0
for _ in run.epochs(epochs):
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        if not run.in_batch:
            steps += 1
            if me == "0" and steps % NOTED == 0:
                now = {name: value.detach().clone() for name, value in net.state_dict().items()}
                noted.append((time.monotonic() - began, now))
ended = time.monotonic() - began
stats, pushing = run.stats(), run.status.pushes
whole = max(1e-9, sum(each.seconds for each in stats))
found: dict[str, object] = {"seconds": ended, "steps": steps}
if pushing:
    found |= {"waiting": pushing.waited_s / ended, "moving": pushing.moved_s / ended}
else:
    found["waiting"] = sum(each.waiting_s for each in stats) / whole
    found["moving"] = sum(each.communication_s for each in stats) / whole
run.close()
(folder / f"ended-{me}").write_text("")
if me == "0":
    curve = []
    for at_s, state in noted:
        net.load_state_dict(state)
        curve.append((at_s, task.accuracy(net)))
    found["curve"] = curve
(folder / f"found-{me}").write_text(json.dumps(found))
