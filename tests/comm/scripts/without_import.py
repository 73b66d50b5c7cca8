"""The backend by its name alone, without an import of mimatrix; integers are averaged as Lightning does it."""

import json
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("mimatrix")
    samples = torch.tensor([3, -4]) + dist.get_rank()
    dist.all_reduce(samples, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"backend": dist.get_backend(), "averages": samples.tolist()}))
    dist.destroy_process_group()
