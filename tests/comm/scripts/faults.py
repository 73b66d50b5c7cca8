"""Ranks that ask for different things, fail, or vanish: what the others are told. One line of JSON for each."""

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch._dynamo  # DDP would import it in every rank, which takes long
import torch.distributed as dist
from forks import forked, joined, say, world
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice


def report(scenario: str, rank: int, call: Callable[[], object]) -> None:
    """Print what a call raises and after how long."""
    started = time.monotonic()
    try:
        call()
        error: Exception | None = None
    except Exception as raised:  # noqa: BLE001 (reported)
        error = raised
    took = time.monotonic() - started
    say({"scenario": scenario, "rank": rank, "error": type(error).__name__, "text": str(error), "took_s": took})


def other_length(rank: int) -> None:
    """Of one size class, which is known to the tuner."""
    joined()
    dist.all_reduce(torch.ones(10))
    report("other length", rank, lambda: dist.all_reduce(torch.ones(11 if rank == 1 else 10)))


def other_class(rank: int) -> None:
    """Of size classes that were never measured."""
    joined()
    report("other class", rank, lambda: dist.all_reduce(torch.ones(5_000 if rank == 1 else 50)))


def known_and_unknown(rank: int) -> None:
    """One rank comes with a size that was measured, the others with one that was not."""
    joined()
    dist.all_reduce(torch.ones(5_000))
    report("known and unknown", rank, lambda: dist.all_reduce(torch.ones(5_000 if rank == 1 else 50)))


def other_type(rank: int) -> None:
    joined()
    dtype = torch.float64 if rank == 2 else torch.float32
    report("other type", rank, lambda: dist.all_reduce(torch.ones(10, dtype=dtype)))


def other_collective(rank: int) -> None:
    joined()
    tensor = torch.ones(10)
    call = (lambda: dist.broadcast(tensor, 0)) if rank == 1 else (lambda: dist.all_reduce(tensor))
    report("other collective", rank, call)


def other_collective_c10d(rank: int) -> None:
    joined()
    world().mimatrix.tuner.cached_choice = lambda _: C10D
    tensor = torch.ones(10)
    call = (lambda: dist.broadcast(tensor, 0)) if rank == 1 else (lambda: dist.all_reduce(tensor))
    report("other collective, c10d", rank, call)


def fails_in_backward(rank: int, choice: AlgorithmChoice) -> None:
    """Rank 1 raises in the middle of training and ends; the others wait for its gradients."""
    joined()
    world().mimatrix.tuner.cached_choice = lambda _: choice
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1)))

    def train() -> None:
        for step in range(100):
            if rank == 1 and step == 3:
                sys.exit(7)
            model(torch.ones(4, 10)).sum().backward()

    report(f"fails in backward, {choice.transport}", rank, train)


def on_windows(rank: int) -> None:
    fails_in_backward(rank, AlgorithmChoice("windows", "gdraa"))


def on_c10d(rank: int) -> None:
    fails_in_backward(rank, C10D)


def killed(rank: int) -> None:
    """Rank 0 itself, with the coordinator."""
    joined()
    dist.all_reduce(torch.ones(10))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    report("killed", rank, lambda: dist.all_reduce(torch.ones(10)))


def raised(rank: int) -> None:
    """Rank 1 ends with an uncaught error, amid c10d collectives."""
    joined()
    if rank == 1:
        sys.last_value = ValueError("what the interpreter leaves behind when it prints a traceback")
        return
    found = [torch.zeros(4) for _ in range(3)]
    report("raised", rank, lambda: dist.all_gather(found, torch.ones(4)))


def between_two(rank: int) -> None:
    """Rank 1 leaves while rank 0 waits for a message of it."""
    joined()
    if rank == 1:
        return
    report("between two", rank, lambda: dist.recv(torch.ones(10), 1))


SCENARIOS = (
    other_length,
    other_class,
    known_and_unknown,
    other_type,
    other_collective,
    other_collective_c10d,
    on_windows,
    on_c10d,
    killed,
    raised,
    between_two,
)

if __name__ == "__main__":
    for each in SCENARIOS:
        if len(sys.argv) < 2 or each.__name__ in sys.argv:
            say({"scenario": each.__name__, "ended": forked(3, each, timeout_s=30)})
