"""Train evenly until the job is ended: both ranks have the same work in every step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix

run = mimatrix.init(64, quiet=True)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(4096, 256), torch.randint(0, 10, (4096,)))


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a micro-batch, with extra work so that a step takes some ten milliseconds."""
    for _ in range(7):
        model(batch[0])
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


model, optimizer, loader = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), dataset, loss=loss_fn)
for _ in run.epochs(1_000_000):
    for batch in loader:
        loss = loss_fn(model, batch)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
