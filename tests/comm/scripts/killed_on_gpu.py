"""A GPU's rank is killed while NCCL runs: `python killed_on_gpu.py between|training|inside`; the others say why.

`between`: the rank has nothing on the GPU while the others wait for it. `training`: the same in a step of the engine,
in stage 3. `inside`: as in `training`, while its own kernels run; under CUDA MPS that is a fault of every process on
the GPU.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mimatrix
from mimatrix.comm.registration import register
from mimatrix.core.errors import MiMatrixError

VICTIM, STEPS = 2, 10
WAY = sys.argv[1]


def main() -> None:
    try:
        reduce() if WAY == "between" else train()
    except (MiMatrixError, RuntimeError) as error:
        say(kind=type(error).__name__, text=str(error).splitlines()[0])
        raise


def reduce() -> None:
    register()
    torch.cuda.set_device(0)
    dist.init_process_group("mimatrix", timeout=timedelta(seconds=30))
    rank, tensor = dist.get_rank(), torch.ones(8 << 20, device="cuda")
    for step in range(100_000):
        if rank == VICTIM and step == STEPS:
            torch.cuda.synchronize()
            time.sleep(0.5)
            die()
        dist.all_reduce(tensor)
        if step % 3 == 2:
            torch.cuda.synchronize()


def train() -> None:
    run = mimatrix.init(global_batch=12, micro_batch=2, stage=3, shares=[0.6, 0.25, 0.15], timeout_s=30, quiet=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = run.prepare(model, optimizer, [torch.zeros(1024)] * 100_000)
    for batch in loader:
        is_last = run.rank == VICTIM and run.step == STEPS
        if is_last and WAY == "training":
            torch.cuda.synchronize()
            die()
        run.backward(model(batch).square().mean())
        if is_last:
            die()
        optimizer.step()


def die() -> None:
    say()
    os.kill(os.getpid(), signal.SIGKILL)


def say(**report: str) -> None:
    sys.stdout.write(json.dumps({**report, "at": time.time()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
