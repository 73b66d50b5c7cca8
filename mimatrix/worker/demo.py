"""What workers of `mimatrix demo` run: train a small network on scikit-learn's digits, evenly and then as planned.

It prints its progress as lines of JSON. First it trains alone for a while: what all workers can do side by side without
communication is the ideal that no split can beat.
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

from mimatrix import init
from mimatrix.engine.run import Run

GLOBAL_BATCH = 512
TRAIN_SAMPLES, SEED = 1536, 0
ALONE_BATCH = 128
Batch = list[torch.Tensor]


class Network(nn.Sequential):
    """A network with much to compute and little to communicate, as people train on devices of different speed."""

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
    """Return the mean loss over a batch."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that does not amplify rounding differences between sums of the same gradients."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def load_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train on and those held out, in a shuffled order that is always the same."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32).reshape(-1, 1, 8, 8)
    inputs = (inputs - inputs.mean()) / inputs.std()
    targets = torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED))
    parts = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    train_set, held_out = (TensorDataset(inputs[part], targets[part]) for part in parts)
    return train_set, held_out


def emit(**fields: Any) -> None:
    """Print a line of JSON for the command that started the workers."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def train_alone(dataset: TensorDataset, seconds: float) -> None:
    """Train on whole global batches without peers for a time, and report how fast that was."""
    model = Network()
    optimizer = build_optimizer(model)
    parts = [list(dataset[start : start + ALONE_BATCH]) for start in range(0, GLOBAL_BATCH, ALONE_BATCH)]
    torch.autograd.backward(loss_fn(model, parts[0]))
    samples, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for part in parts:
            torch.autograd.backward(loss_fn(model, part) / len(parts))
        optimizer.step()
        optimizer.zero_grad()
        samples += GLOBAL_BATCH
    emit(phase="alone", event="ended", samples=samples, seconds=time.perf_counter() - began)


def train(phase: str, epochs: int, train_set: TensorDataset, held_out: TensorDataset, **settings: Any) -> None:
    """Train from the same start; report every step, and at the end the accuracy on held-out digits."""
    torch.manual_seed(SEED)
    run = init(GLOBAL_BATCH, seed=SEED, quiet=True, **settings)
    emit(phase=phase, event="measuring" if settings else "preparing")
    model = Network()
    wrapped, optimizer, loader = run.prepare(model, build_optimizer(model), train_set, loss=loss_fn)
    predicted_s = run.plan.step_s if run.plan else None
    steps = epochs * len(loader)
    emit(phase=phase, event="began", batches=current_batches(run), steps=steps, predicted_s=predicted_s)
    reported = 0
    for _ in run.epochs(epochs):
        for batch in loader:
            loss = loss_fn(wrapped, batch)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            reported = emit_steps(phase, run, reported)
    emit_steps(phase, run, reported)
    metrics = run.evaluate(wrapped, held_out, accuracy)
    losses = [means["loss"] for _, means in run.history]
    emit(phase=phase, event="ended", accuracy=metrics["accuracy"], losses=losses, batches=current_batches(run))


def current_batches(run: Run) -> tuple[int, ...]:
    """Return how many samples of a global batch each rank has; a plan may have changed it meanwhile."""
    return (run.plan.split if run.plan else run.split).batches


def emit_steps(phase: str, run: Run, reported: int) -> int:
    """Report the steps after the first `reported`; return how many are reported now."""
    stats = run.stats()
    for step in stats[reported:]:
        emit(
            phase=phase,
            event="step",
            step=step.step,
            samples=current_batches(run)[run.rank],
            seconds=step.seconds,
            busy_s=step.compute_s + step.data_s,
            moving_s=step.communication_s,
            waiting_s=step.waiting_s,
        )
    return len(stats)


def accuracy(model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the fraction of a batch that is recognised."""
    inputs, targets = batch
    return {"accuracy": (model(inputs).argmax(1) == targets).float().mean().item()}


def main() -> None:
    """Train alone, then evenly split, then as planned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--alone", type=float, default=4.0, help="seconds")
    options = parser.parse_args()
    train_set, held_out = load_datasets()
    init(GLOBAL_BATCH, seed=SEED, quiet=True)
    emit(phase="alone", event="preparing")
    if dist.is_initialized():
        # All at the same time from here on: slow workers also took longer to start.
        dist.barrier()
    train_alone(train_set, options.alone)
    train("even", options.epochs, train_set, held_out)
    train("planned", options.epochs, train_set, held_out, plan="profile")


if __name__ == "__main__":
    main()
