"""Measure with less memory than is believed: `overflowing.py MEGABYTES SIDE`, one line of JSON.

Beyond so much more than it has already the kernel gives this process nothing, and torch says so.
"""

import json
import resource
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.profile_targets import convolutions

from mimatrix.core.errors import UserError
from mimatrix.profiler import Limits, measure_device
from mimatrix.profiler.trial import Trial


def main(megabytes: float, side: int) -> None:
    torch.set_num_threads(1)
    measure_device(convolutions(), Limits(max_samples=2, available_bytes=1 << 30, seconds=1))
    target = convolutions(side)
    data = Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]
    resource.setrlimit(resource.RLIMIT_DATA, (int(data) * 1024 + int(megabytes * 1e6),) * 2)
    try:
        profile = measure_device(target, Limits(max_samples=100_000, available_bytes=1 << 40, seconds=300))
    except UserError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return
    # Everything was given back: what was measured last runs again.
    trial = Trial(target)
    with trial.capture_grads():
        trial.run(profile.memory.most // 2)
    result = {"most": profile.memory.most, "overflows": profile.overflows, "bytes": profile.memory.points[-1][1]}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
