"""A plain loop in one process on the union of each batch: what every split must give."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mimatrix.planner.model.split import Split

Data = list[Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]
Weigh = Callable[[Any], float]


def plain_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    loss: Loss,
    *,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
) -> list[float]:
    """Step on whole global batches, and return the loss of each."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], max_grad_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(float(value.detach()))
    return losses


def plain_rounds(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], loss: Loss, split: Split, scheduler: Any
) -> None:
    """Step where samples depend on each other: each micro-step is the union of what the ranks have in it."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        for number in range(split.rounds):
            rows = [
                row
                for rank in range(split.ranks)
                for row in (split.ranges(rank)[number] if number < len(split.ranges(rank)) else ())
            ]
            part = loss(model, (inputs[rows], targets[rows]))
            (part * (len(rows) / split.total)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
