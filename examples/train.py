"""The ten lines of the README around a small model: `mimatrix run -n 3 --speeds 1,0.5,0.25 examples/train.py`.

It runs the same under torchrun and alone, and writes the loss of every step to a file if one is named.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean over a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--batch", default="auto", help="samples of each rank, such as 32,16,16")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--losses", type=Path)
options = parser.parse_args()
batch = "auto" if options.batch == "auto" else [int(word) for word in options.batch.split(",")]

torch.manual_seed(0)
inputs = torch.randn(2000, 20, dtype=torch.float64)
dataset = TensorDataset(inputs, (inputs[:, :5].sum(1) > 0).long())
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

run = mimatrix.init(global_batch=64, batch=batch, stage=options.stage)
model, optimizer, loader = run.prepare(model, optimizer, dataset, loss=loss_fn)

for _ in run.epochs(options.epochs):
    for batch in loader:
        loss = loss_fn(model, batch)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)

if run.rank == 0:
    losses = [means["loss"] for _, means in run.history]
    print(f"{run.world_size} ranks, {run.step} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if options.losses:
        options.losses.write_text(json.dumps(losses))
