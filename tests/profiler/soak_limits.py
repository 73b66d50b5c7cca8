"""Measuring and training under random limits of memory: nobody runs out of it. `soak_limits.py --runs 50`.

Without a GPU the limit is a control group's (root), beyond which a process is killed; with one it is a part of the GPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).parent / "scripts" / "limited.py"
ROOT = Path(__file__).parents[2]
MB = 1_000_000


def one(seed: int) -> dict[str, Any]:
    """Run a script within a limit, and return the limit and how the run ended."""
    chance = random.Random(1000 + seed)
    gpu = torch.cuda.is_available()
    # What Python and torch take on a CPU comes first; a GPU's limit is for tensors alone.
    limit = int(10 ** chance.uniform(1.5, 3.2)) * MB if gpu else int((400 + 10 ** chance.uniform(1.3, 2.9)) * MB)
    words = [] if gpu else ["-m", "mimatrix.cli.main", "run", "-n", "1", "--memory", str(limit)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words, str(SCRIPT), str(seed)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ
        | {"LIMIT": str(limit), "MIMATRIX_CACHE": tempfile.mkdtemp(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    said = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    found = json.loads(said[-1]) if said and done.returncode == 0 else {"escaped": done.stderr[-3000:]}
    return {"seed": seed, "limit": limit, "seconds": time.monotonic() - began, "code": done.returncode, **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", help="only these")
    options = parser.parse_args()
    counts = {"micro": 0, "refused": 0, "escaped": 0}
    with ThreadPoolExecutor(options.parallel) as pool:
        for found in pool.map(one, options.seeds or range(options.runs)):
            kind = next(kind for kind in counts if kind in found)
            counts[kind] += 1
            print(
                json.dumps(found)
                if kind == "escaped"
                else f"{found['seed']}: {found['limit'] / MB:.0f} MB, {found[kind]}"
            )
    print(
        f"{counts['micro']} trained, {counts['refused']} refused in a sentence, {counts['escaped']} ran out of memory"
    )
    sys.exit(1 if counts["escaped"] else 0)


if __name__ == "__main__":
    main()
