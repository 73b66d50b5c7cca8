"""One rank of a comparison: `python -m bench.heterogeneous.worker TASK FOLDER`, with torchrun's variables."""

import json
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench.heterogeneous.tasks import NOTHING, Meter, RankRecord, TrainingTask


def main(text: str, place: str) -> None:
    """Train as the task says and write the record."""
    task, rank, folder = TrainingTask.from_text(text), int(os.environ["RANK"]), Path(place)
    import torch

    torch.set_num_threads(1)
    from bench.heterogeneous.alone import ALONE, alone
    from bench.heterogeneous.baselines import WAYS
    from bench.heterogeneous.workload import Rows

    rows = Rows(task)
    record = RankRecord(time.monotonic(), warm_up=task.warm_up)
    meter = Meter(task, folder, rank, time.monotonic, record)
    if task.who == ALONE:
        record.rate, record.micro_batch = alone(task, rows)
    elif task.who == NOTHING:
        import mimatrix

        mimatrix.init(global_batch=task.global_batch, quiet=True)
    else:
        WAYS[task.who](task, rows, meter)
    record.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(record)))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # torch on Gloo aborts now and then while the interpreter is taken down ("terminate called without an active exception").
    os._exit(0)
