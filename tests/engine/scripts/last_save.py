"""Train two steps, and save as the last thing, in one of several wrong ways."""

import atexit
import sys

import torch
from torch import nn

import mimatrix


def main(how: str, folder: str) -> None:
    torch.set_num_threads(1)
    atexit.register(sys.stdout.write, "exit handler\n")
    run = mimatrix.init(global_batch=4, quiet=True, timeout_s=20)
    model = nn.Linear(3, 1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, [torch.ones(3)] * 8)
    for batch in loader:
        run.backward(model(batch).mean())
        optimizer.step()
    match how:
        case "impossible folder":
            run.save("/proc/nope")
        case "rank 0 only":
            if run.rank == 0:
                run.save(folder)
        case "rank 1 only":
            if run.rank == 1:
                run.save(folder)


main(*sys.argv[1:])
