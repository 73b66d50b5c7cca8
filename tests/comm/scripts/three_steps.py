"""Train three steps in float64 and write this rank's parameters and what all ranks gathered over Gloo to a file.

Usage: three_steps.py MODE OUTPUT
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mimatrix

STEPS, BATCH = 3, 4


def main(mode: str, output: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    run = mimatrix.init(global_batch=BATCH, mode=mode, stage=0, quiet=True, timeout_s=20)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    data = [torch.randn(4, dtype=torch.float64) for _ in range(STEPS * BATCH)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _, optimizer, loader = run.prepare(model, optimizer, data)
    for batch in loader:
        run.backward(model(batch).square().mean())
        optimizer.step()
    report = {
        "steps": run.step,
        "parameters": [value.tolist() for value in run.full_state_dict(model).values()],
        "gathered": gather_ranks(ranks) if mode == "sync" and ranks > 1 else [],
    }
    Path(output).write_text(json.dumps(report))


def gather_ranks(ranks: int) -> list[int]:
    """Gather the rank of each process; c10d carries lists."""
    gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(gathered, torch.tensor([dist.get_rank()]))
    return [int(number) for number in gathered]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
