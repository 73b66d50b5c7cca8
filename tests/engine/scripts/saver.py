"""Train and save without end, in arithmetic that shows at once whether what is loaded belongs together.

Every element's gradient is 1, the momentum keeps all of it: after n steps it is n, and the parameters -n (n + 1) / 2.
"""

import os
import sys

import torch
from torch import nn

import mimatrix

ELEMENTS = 300_000


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(ELEMENTS // 3) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * 0 + torch.stack([part.sum() for part in self.parts]).sum()


def main(folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    shares = [0.7, 0.3] if ranks == 2 else None
    run = mimatrix.init(global_batch=2, stage=2, shares=shares, unit_bytes=400_000, quiet=True, timeout_s=20)
    model = Counting()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    _, optimizer, loader = run.prepare(model, optimizer, [torch.ones(1)] * 2000)
    loaded = run.load(folder)
    values = torch.cat([part.detach() for part in model.parts])
    kept = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert torch.all(values == -run.step * (run.step + 1) / 2), f"step {run.step} has {values}"
    assert all(torch.all(each == run.step) for each in kept), f"step {run.step} has other momentum"
    assert bool(kept) == loaded
    sys.stdout.write(f"loaded {run.step} {os.getpid()}\n")
    sys.stdout.flush()
    for _ in range(1_000_000 if steps else 0):
        for x in loader:
            run.backward(model(x))
            optimizer.step()
            run.save(folder, keep=2)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
