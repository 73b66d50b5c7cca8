"""Measure, plan and train a few steps with as little memory as is given: `limited.py SEED`.

On a GPU the limit is a part of it (LIMIT bytes); on the CPU it is the launcher's (`mimatrix run --memory`).
"""

import json
import os
import random
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix
from mimatrix.core.errors import UserError


def model_of(chance: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    if chance.random() < 0.5:
        width, depth = chance.choice((256, 512, 1024)), chance.randint(2, 6)
        layers: list[nn.Module] = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10)), (width,)
    width = chance.choice((8, 16, 32))
    layers = [
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)), (
        3,
        32,
        32,
    )


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main(seed: int) -> None:
    chance = random.Random(seed)
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(int(os.environ["LIMIT"]) / total)
    model, shape = model_of(chance)
    batch = chance.choice((64, 256, 1024))
    run = mimatrix.init(batch, plan="profile", quiet=True)
    torch.manual_seed(seed)
    rows = torch.randn(2 * batch, *shape)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    try:
        dataset = TensorDataset(rows, torch.randint(0, 10, (2 * batch,)))
        model, optimizer, loader = run.prepare(model, optimizer, dataset, loss=loss_fn)
    except UserError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    for _ in run.epochs(2):
        for each in loader:
            run.backward(loss_fn(model, each))
            optimizer.step()
            optimizer.zero_grad()
    assert run.plan
    print(json.dumps({"micro": run.plan.split.to_json()[0][:2], "took": run.step}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
