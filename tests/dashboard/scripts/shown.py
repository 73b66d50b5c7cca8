"""Trains for so many seconds, saving now and then: as planned, or evenly with a second rank that slows at the half."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix

EVERY = 500
seconds, plan = float(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
inputs = torch.randn(8192, 64)
targets = (inputs[:, :8].sum(1) + torch.randn(8192) > 0).long()
net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
sgd = torch.optim.SGD(net.parameters(), lr=0.003, momentum=0.9)


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


run = mimatrix.init(global_batch=256, **({"plan": "profile"} if plan == "planned" else {"stage": 0}))
model, optimizer, loader = run.prepare(net, sgd, TensorDataset(inputs, targets), loss=loss_fn)
begun = time.monotonic()
for _ in run.epochs(10_000):
    for batch in loader:
        logits = model(batch[0])
        if plan != "planned" and run.rank == 1 and time.monotonic() - begun > seconds / 2:
            time.sleep(0.06)
        loss = nn.functional.cross_entropy(logits, batch[1])
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss, accuracy=(logits.argmax(1) == batch[1]).float().mean())
        if not run.in_batch and run.step % EVERY == 0:
            run.save(os.environ["MIMATRIX_CHECKPOINTS"])
    if time.monotonic() - begun > seconds:
        break
