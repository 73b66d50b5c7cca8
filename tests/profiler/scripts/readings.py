"""Memory readings of two models beside what their tensors hold: `readings.py`, one line of JSON."""

import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.profile_targets import Counting, convolutions, mlp

from mimatrix.profiler.memory import _peak_of_saved, peak_bytes
from mimatrix.profiler.trial import Trial

BATCHES = {"mlp": (1, 64, 512, 2048), "convolutions": (1, 32, 128, 512)}


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, subject in (("mlp", mlp()), ("convolutions", convolutions())):
        passes, rows = Trial(subject), []
        with passes.hooked():
            passes.run(2)
            for batch in BATCHES[name]:
                run = partial(passes.run, batch)
                read, saved = peak_bytes(run, subject.device), _peak_of_saved(run)
                with Counting(subject.model) as counting:
                    passes.run(batch)
                rows.append([read, saved, counting.peak - passes.scratch_bytes])
        found[name] = rows
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
