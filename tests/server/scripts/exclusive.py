"""Works for a while and counts; refuses to run while another process of the same rank and job does."""

import fcntl
import os
import sys
import time
from pathlib import Path

folder = Path(os.environ["MIMATRIX_CHECKPOINTS"])
folder.mkdir(parents=True, exist_ok=True)
lock = (folder / f"lock-{os.environ['MIMATRIX_RANK']}").open("a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    with (folder / "twice").open("a") as twice:
        twice.write(f"{os.environ['MIMATRIX_GENERATION']}\n")
    sys.exit(3)
count, deadline = 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < deadline:
    count += 1
    print("tick", count, flush=True)
    time.sleep(0.1)
with (folder / "runs").open("a") as runs:
    runs.write(f"{os.environ['MIMATRIX_GENERATION']}\n")
