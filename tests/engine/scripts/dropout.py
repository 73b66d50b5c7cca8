"""Train with dropout for some steps, and write this rank's masks and the weights to a file; save in the middle.

Usage: dropout.py FOLDER OUTPUT STEPS
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

import mimatrix


class Noisy(Dataset[Any]):
    """Augments in this process, with the generators of torch, Python and NumPy."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> torch.Tensor:
        noise = torch.rand(4, dtype=torch.float64) + random.random() + numpy.random.rand()
        return row + noise / 10


def main(folder: str, output: str, steps: int) -> None:
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(11)
    run = mimatrix.init(global_batch=4, batch=[3, 1], micro_batch=1, stage=2, unit_bytes=64, quiet=True, timeout_s=20)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    first_weight = float(model[0].weight[0, 0].detach())  # type: ignore[index]
    masks: list[list[float]] = []
    model[1].register_forward_hook(lambda _, inputs, y: masks.append((y != 0).double().flatten().tolist()))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _, optimizer, loader = run.prepare(model, optimizer, Noisy())
    run.load(folder)
    for _ in run.epochs(100):
        for batch in loader:
            run.backward(model(batch).mean())
            optimizer.step()
            if not run.in_batch and run.step == 3:
                run.save(folder, wait=True)
                masks.clear()
            if not run.in_batch and run.step == steps:
                break
        if run.step == steps:
            break
    weights = [value.tolist() for value in run.full_state_dict(model).values()]
    report = {"first": first_weight, "masks": masks, "weights": weights}
    Path(f"{output}.{run.rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
