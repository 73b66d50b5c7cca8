"""Memory readings of two models beside what their tensors hold: `readings.py`, one line of JSON."""

import json
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.profile_targets import PeakCounter, convolutions, mlp

from mimatrix.profiler.memory import _saved_tensors_peak_bytes, peak_bytes
from mimatrix.profiler.trial import Trial

BATCHES = {"mlp": (1, 64, 512, 2048), "convolutions": (1, 32, 128, 512)}


def main() -> None:
    torch.set_num_threads(1)
    rows_by_model = {}
    for name, target in (("mlp", mlp()), ("convolutions", convolutions())):
        trial, rows = Trial(target), []
        with trial.capture_grads():
            trial.run(2)
            for batch in BATCHES[name]:
                run = partial(trial.run, batch)
                read, saved = peak_bytes(run, target.device), _saved_tensors_peak_bytes(run)
                with PeakCounter(target.model) as counter:
                    trial.run(batch)
                rows.append([read, saved, counter.peak - trial.scratch_bytes])
        rows_by_model[name] = rows
    sys.stdout.write(json.dumps(rows_by_model) + "\n")


if __name__ == "__main__":
    main()
