"""Parts 1 and 2: ranks of one host, with tensors in the arena and with ordinary ones; DDP."""

import json
import os
import subprocess
import sys
import tempfile

from bench.allreduce.common import Rows, command, keep

RUNS = (
    ("allreduce", 2, "4KiB,64KiB,1MiB,4MiB,16MiB,64MiB,256MiB"),
    ("allreduce", 4, "64KiB,4MiB,64MiB"),
    ("reducescatter", 2, "64KiB,4MiB,64MiB"),
    ("allgather", 2, "64KiB,4MiB,64MiB"),
)

DDP_PAIRS = 7


def measure() -> None:
    """Measure the collectives and DDP. Writes `same_host.json` and `ddp.json`."""
    os.environ["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    rows: Rows = []
    for collective, world, sizes in RUNS:
        print(f"same host: {collective}, {world} ranks", flush=True)
        words = ["bench", collective, "--world", str(world), "--bytes", sizes, "--against", "gloo,mpi"]
        rows += json.loads(command(*words, "--seconds", "6", "--json"))
    keep("same_host", rows)
    measure_ddp()


def measure_ddp() -> None:
    """Measure DDP in several pairs of processes: the layout of their memory matters more than the turns of one pair."""
    found = []
    for number in range(DDP_PAIRS):
        print(f"DDP, pair {number + 1} of {DDP_PAIRS}", flush=True)
        words = [sys.executable, "-m", "bench.allreduce.ddp"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    keep("ddp", found)
