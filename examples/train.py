"""The ten lines of the README around a small model: `mimatrix run -n 3 --speeds 1,0.5,0.25 examples/train.py`.

It runs the same under torchrun and alone, and writes the loss of every step to a file if one is named.
"""

import argparse
import json
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def batch_sizes(text: str) -> list[int] | Literal["auto"]:
    """Read "auto", or numbers with commas between them."""
    return "auto" if text == "auto" else [int(size) for size in text.split(",")]


parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, choices=range(4), default=0, help="ZeRO stage")
parser.add_argument("--batch", type=batch_sizes, default="auto", help="samples per rank, such as 32,16,16")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--losses", type=Path, help="JSON file for the loss of every step")
options = parser.parse_args()

run = mimatrix.init(global_batch=64, batch=options.batch, stage=options.stage, seed=0)

# Every rank builds the same data and the same model.
torch.manual_seed(0)
inputs = torch.randn(2000, 20, dtype=torch.float64)
dataset = TensorDataset(inputs, (inputs[:, :5].sum(1) > 0).long())
network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).double()
adamw = torch.optim.AdamW(network.parameters(), lr=1e-3)

model, optimizer, loader = run.prepare(network, adamw, dataset, loss=loss_fn)

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
