"""The ideal: each rank trains by itself at its own best micro-batch, all at the same time, without communication."""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from bench.heterogeneous.tasks import TrainingTask
from bench.heterogeneous.workload import Rows, loss_of, model_of, optimizer_of

ALONE = "ideal"
TRIED = (64, 128, 256, 512)


def alone(task: TrainingTask, rows: Rows) -> tuple[float, int]:
    """Return samples per second of this rank, optimizer included, and the micro-batch that reached them."""
    model = model_of(task)
    optimizer = optimizer_of(task, model)

    def step(samples: int) -> None:
        torch.autograd.backward(loss_of(model, rows.part(task, 0, 0, samples)))
        optimizer.step()
        optimizer.zero_grad()

    sizes = [size for size in TRIED if size <= task.global_batch] or [task.global_batch]
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    dist.barrier()
    speeds = {size: size / statistics.median(_seconds(step, size) for _ in range(3)) for size in sizes}
    best = max(sizes, key=lambda size: speeds[size])
    dist.barrier()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < task.seconds:
        step(best)
        done += best
    rate = done / (time.perf_counter() - began)
    # A rank that is done first continues, so that the slower ones are not measured on an emptier machine.
    over = time.perf_counter() + 0.5
    while time.perf_counter() < over:
        step(min(sizes))
    dist.barrier()
    dist.destroy_process_group()
    return rate, best


def _seconds(step: Callable[[int], None], samples: int) -> float:
    began = time.perf_counter()
    step(samples)
    return time.perf_counter() - began
