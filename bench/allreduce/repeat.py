"""One rank that runs one algorithm several times: `python -m bench.allreduce.repeat "send_recv hdrm" BYTES TIMES`."""

import sys
from typing import Any

import torch
import torch.distributed as dist

from mimatrix.comm.tuning.choice import AlgorithmChoice


def main() -> None:
    """Run the algorithm, and nothing else that would count on the links."""
    choice, size, times = AlgorithmChoice.parse(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("mimatrix")
    world: Any = dist.group.WORLD
    tensor = torch.ones(size // 4)
    for _ in range(times):
        world.mimatrix.all_reduce(tensor, choice=choice)
        tensor.fill_(1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
