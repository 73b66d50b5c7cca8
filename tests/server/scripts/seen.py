"""Trains for as long as it is let, with steps of some 20 ms that a processor is busy in: `seen.py [profile]`."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix

run = mimatrix.init(64, plan="profile" if "profile" in sys.argv else None)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512, 256), torch.randint(0, 10, (512,)))


def loss_fn(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    for _ in range(7):
        net(batch[0])
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


prepared, stepper, loader = run.prepare(model, optimizer, dataset, loss=loss_fn)
for _ in run.epochs(1_000_000):
    for batch in loader:
        loss = loss_fn(prepared, batch)
        run.backward(loss)
        stepper.step()
        stepper.zero_grad()
        run.log(loss=loss)
