"""What every worker of `mimatrix demo` runs: a small network learns scikit-learn's digits, evenly and then as planned.

It tells what it does in lines of JSON. Before that it works alone for a while: what all workers can do side by side
without exchanging anything is the ideal that no split can beat.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from mimatrix.engine.api import init
from mimatrix.engine.run import Run

GLOBAL_BATCH = 512
TRAINED, SEED = 1536, 0
ALONE_BATCH = 128
Batch = list[torch.Tensor]


class Network(nn.Sequential):
    """Much to compute and little to move: on real machines that is what devices of unlike speed are shared for."""

    def __init__(self, width: int = 96) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 16, 10),
        )


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def learner(model: nn.Module) -> torch.optim.Optimizer:
    """One that does not blow up the last digit in which two sums of the same gradients differ."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Those to learn and those held out, in a mixed order that is always the same."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    inputs = torch.tensor(found.data, dtype=torch.float32).reshape(-1, 1, 8, 8)
    inputs = (inputs - inputs.mean()) / inputs.std()
    targets = torch.tensor(found.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED))
    parts = order[:TRAINED], order[TRAINED:]
    learnt, held_out = (TensorDataset(inputs[part], targets[part]) for part in parts)
    return learnt, held_out


def tell(**fields: Any) -> None:
    """To whoever started the workers."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def work_alone(dataset: TensorDataset, seconds: float) -> None:
    """Train on whole global batches without anybody else, for as long as that; tell how fast that was."""
    model = Network()
    optimizer = learner(model)
    parts = [list(dataset[start : start + ALONE_BATCH]) for start in range(0, GLOBAL_BATCH, ALONE_BATCH)]
    torch.autograd.backward(loss_fn(model, parts[0]))
    samples, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for part in parts:
            torch.autograd.backward(loss_fn(model, part) / len(parts))
        optimizer.step()
        optimizer.zero_grad()
        samples += GLOBAL_BATCH
    tell(phase="alone", event="ended", samples=samples, seconds=time.perf_counter() - began)


def train(phase: str, epochs: int, learnt: TensorDataset, held_out: TensorDataset, **how: Any) -> None:
    """One training from the same start; every step is told, at the end the accuracy on digits never seen."""
    run = init(GLOBAL_BATCH, seed=SEED, quiet=True, **how)
    tell(phase=phase, event="measuring" if how else "preparing")
    model = Network()
    wrapped, optimizer, loader = run.prepare(model, learner(model), learnt, loss=loss_fn)
    predicted_s = run.plan.step_s if run.plan else None
    steps = epochs * len(loader)
    tell(phase=phase, event="began", batches=batches_of(run), steps=steps, predicted_s=predicted_s)
    told = 0
    for _ in run.epochs(epochs):
        for batch in loader:
            loss = loss_fn(wrapped, batch)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            told = tell_steps(phase, run, told)
    tell_steps(phase, run, told)
    found = run.evaluate(wrapped, held_out, accuracy)
    losses = [means["loss"] for _, means in run.history]
    tell(phase=phase, event="ended", accuracy=found["accuracy"], losses=losses, batches=batches_of(run))


def batches_of(run: Run) -> tuple[int, ...]:
    """What each rank takes of a global batch; a plan may have changed it on the way."""
    return (run.plan.split if run.plan else run.split).batches


def tell_steps(phase: str, run: Run, told: int) -> int:
    """What is not told yet; gives the number of steps that are."""
    stats = run.stats()
    for each in stats[told:]:
        tell(
            phase=phase,
            event="step",
            step=each.step,
            samples=batches_of(run)[run.rank],
            seconds=each.seconds,
            busy_s=each.compute_s + each.data_s,
            moving_s=each.communication_s,
            waiting_s=each.waiting_s,
        )
    return len(stats)


def accuracy(model: nn.Module, batch: Batch) -> dict[str, float]:
    """The part of a batch that is recognised."""
    inputs, targets = batch
    return {"accuracy": (model(inputs).argmax(1) == targets).float().mean().item()}


def main() -> None:
    """Alone, evenly, as planned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--alone", type=float, default=4.0, help="seconds")
    options = parser.parse_args()
    learnt, held_out = digits()
    init(GLOBAL_BATCH, seed=SEED, quiet=True)
    tell(phase="alone", event="preparing")
    if dist.is_initialized():
        # Side by side from here: who is slow was slow to start, too.
        dist.barrier()
    work_alone(learnt, options.alone)
    train("even", options.epochs, learnt, held_out)
    train("planned", options.epochs, learnt, held_out, plan="profile")


if __name__ == "__main__":
    main()
