"""Ranks as processes forked from one that has imported torch already: quick to start, and as real as any."""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from mimatrix.processes.ports import free_port


def forked(size: int, each: Callable[[int], None], timeout_s: float = 50.0) -> list[int]:
    """Run `each(rank)` in as many processes, with the environment of torchrun; how they ended (-9: it hung).

    They end as any interpreter does, so that what happens at exit is seen too.
    """
    port = free_port("127.0.0.1")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    gc.freeze()  # so that ranks do not copy what they never touch, and end sooner
    ranks = [_fork(rank, each) for rank in range(size)]
    until = time.monotonic() + timeout_s
    return [_ended(child, until) for child in ranks]


def require(ended: list[int]) -> None:
    """Exit with an error unless all ranks ended well."""
    if any(ended):
        sys.exit(f"ranks ended with {ended}")


def joined(backend: str = "mimatrix") -> int:
    """Join the job; this rank."""
    dist.init_process_group(backend)
    return dist.get_rank()


def world() -> Any:
    """Return the default group, untyped because torch's stubs know no backends in Python."""
    return dist.group.WORLD


def say(what: object) -> None:
    """One line of JSON for whoever started the script."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _fork(rank: int, each: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        each(rank)
    except Exception:  # noqa: BLE001 (it is printed, and the exit status says it)
        sys.stderr.write(f"rank {rank}: {traceback.format_exc()}\n")
        sys.exit(1)
    sys.exit(0)


def _ended(child: int, until: float) -> int:
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
