"""One rank on a part of a GPU: averages of weights, streams of ranks, dropout, clipping by hand.

Says how far each is from a plain loop on the same device. Started by test_engine_gpu.py.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from support.models import Perceptron, cross_entropy, momentum, vectors  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402
from torch.utils.data import IterableDataset, default_collate  # noqa: E402

import mimatrix  # noqa: E402

BATCHES, MICRO, SHARES, STEPS = [5, 2, 1], [2, 1, 1], [0.6, 0.3, 0.1], 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DATA = vectors(sum(BATCHES) * STEPS)


class OwnStream(IterableDataset[Any]):
    """The samples of one rank, in the order in which the shared dataset gives them to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        first, total = sum(BATCHES[: self.rank]), sum(BATCHES)
        for start in range(0, len(DATA), total):
            yield from DATA[start + first : start + first + BATCHES[self.rank]]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Perceptron().double().to(DEVICE)
    return model, momentum(model)


def plain() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for start in range(0, len(DATA), sum(BATCHES)):
        batch = [part.to(DEVICE) for part in default_collate(DATA[start : start + sum(BATCHES)])]
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict()


def trained(stage: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    run = start(stage)
    model, optimizer = build()
    _, optimizer, loader = run.prepare(model, optimizer, OwnStream(run.rank), stream_per_rank=True)
    ema = run.ema(0.9)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        optimizer.step()
    found = run.full_state_dict(), ema.full_state_dict()
    run.close()
    return found


def start(stage: Any) -> Any:
    return mimatrix.init(
        batch=BATCHES, micro_batch=MICRO, shares=SHARES, stage=stage, unit_bytes=300, timeout_s=60, quiet=True
    )


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value.cpu()).abs().max()) for name, value in expected.items())


def refused() -> tuple[str, list[float]]:
    """Return what clipping by hand is answered, and this rank's first dropout mask."""
    run = start(0)
    model, optimizer = build()
    _, optimizer, loader = run.prepare(model, optimizer, DATA)
    mask = nn.functional.dropout(torch.ones(32, device=DEVICE)).tolist()
    answer = ""
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except mimatrix.UserError as error:
            answer = str(error)
        optimizer.step()
    run.close()
    return answer, mask


def main() -> None:
    weights, averages = plain()
    differences = {}
    for stage in range(4):
        found, averaged = trained(stage)
        differences[f"stage {stage}"] = apart(found, weights)
        differences[f"average, stage {stage}"] = apart(averaged, averages)
    answer, mask = refused()
    print(json.dumps({"apart": differences, "refused": answer, "mask": mask}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
