"""One rank on a part of a GPU, or on a CPU: every stage and model against a plain loop on the same device.

Says how far they are apart, then trains with a plan that is measured. With `refused` as an argument, peer access
between GPUs is refused; with `auto`, only a run in mode="auto". Started by test_engine_gpu.py.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from support.models import (  # noqa: E402
    Perceptron,
    Residual,
    Transformer,
    adamw,
    cross_entropy,
    images,
    momentum,
    sentences,
    token_cross_entropy,
    vectors,
)
from support.plain import plain_rounds, plain_run  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

import mimatrix  # noqa: E402
from mimatrix.comm.memory import peer_access  # noqa: E402
from mimatrix.planner.model.split import Split  # noqa: E402

STEPS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = int(os.environ["WORLD_SIZE"])
BATCHES, MICRO = [5, 2, 1][:RANKS], [2, 1, 1][:RANKS]
SHARES = {2: [0.7, 0.3], 3: [0.6, 0.3, 0.1]}[RANKS]
CASES: dict[str, Any] = {
    "perceptron": (Perceptron, momentum, vectors, cross_entropy, {}),
    "transformer": (Transformer, adamw, sentences, token_cross_entropy, {"max_grad_norm": 0.5}),
    "residual": (Residual, momentum, images, cross_entropy, {}),
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double().to(DEVICE)


def apart(name: str, stage: int) -> float:
    """Return the largest difference between the parameters of the engine and of a plain loop."""
    kind, optimizer_of, data_of, loss, more = CASES[name]
    total = sum(BATCHES)
    data = data_of(STEPS * total)
    reference = made(kind)
    stepper = optimizer_of(reference)
    batches: list[Any] = []
    for start in range(0, len(data), total):
        batch = default_collate(data[start : start + total])
        batches.append([part.to(DEVICE) for part in batch] if isinstance(batch, list) else batch.to(DEVICE))
    halving = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    if kind is Residual:
        plain_rounds(reference, stepper, batches, loss, Split.of(BATCHES, MICRO), halving)
    else:
        plain_run(reference, stepper, batches, loss, scheduler=halving, max_grad_norm=more.get("max_grad_norm"))
    found = trained(made(kind), optimizer_of, data, loss, stage, more)
    return max(float((found[key] - value.cpu()).abs().max()) for key, value in reference.state_dict().items())


def trained(model: Any, optimizer_of: Any, data: Any, loss: Any, stage: Any, more: Any) -> dict[str, torch.Tensor]:
    run = mimatrix.init(
        batch=BATCHES, micro_batch=MICRO, shares=SHARES, stage=stage, unit_bytes=300, timeout_s=60, quiet=True, **more
    )
    optimizer = optimizer_of(model)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, data, halving, loss=loss, shuffle=False)
    for batch in loader:
        run.backward(loss(model, batch), weight=float((batch != 0).sum()) if loss is token_cross_entropy else None)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    found = run.full_state_dict(model)
    run.close()
    return found


def planned(**settings: Any) -> dict[str, Any]:
    """Train a few steps with a plan that is measured; the plan, and whether all ranks have the same parameters."""
    torch.manual_seed(0)
    model, data = made(Perceptron), vectors(12 * 16)
    run = mimatrix.init(global_batch=16, timeout_s=60, quiet=True, **settings)
    optimizer = momentum(model)
    model, optimizer, loader = run.prepare(model, optimizer, data, loss=cross_entropy)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        optimizer.step()
    found = {"stage": run.stage, "batches": run.split.batches, "steps": run.step}
    run.close()
    return found


class Warnings(logging.Handler):
    """Keeps what is logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    if "auto" in sys.argv:
        print(json.dumps(planned(mode="auto")), flush=True)
        return
    if "refused" in sys.argv:
        peer_access.can_access_peer = lambda own, peer: "refused by the test"
    warnings = Warnings()
    logging.getLogger("mimatrix").addHandler(warnings)
    found = {f"{name}, stage {stage}": apart(name, stage) for name in CASES for stage in range(4)}
    world: Any = dist.group.WORLD
    report = {
        "rank": dist.get_rank(),
        "apart": found,
        "counters": world.counters,
        "transports": [str(row) for row in world.mimatrix.transport_status()],
        "tuner": world.mimatrix.tuner.table,
        "profile": planned(plan="profile"),
        "warnings": [line for line in warnings.lines if "cannot read" in line],
    }
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
