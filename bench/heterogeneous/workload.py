"""The workload of every competitor: the model, its optimizer, its data, and how a rank's part of a batch is read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from bench.heterogeneous.tasks import TrainingTask

OUTPUTS = 16
Pair = tuple[torch.Tensor, torch.Tensor]


class Rows(Dataset[Pair]):
    """Samples in memory; a batch is read at once, by one index."""

    def __init__(self, task: TrainingTask) -> None:
        kind = torch.float64 if task.double else torch.float32
        chance = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(task.global_batch * task.batches, task.width, generator=chance, dtype=kind)
        self.targets = self.inputs[:, :OUTPUTS] + self.inputs[:, OUTPUTS : 2 * OUTPUTS]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Pair:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> "ReadBatch":
        places = torch.as_tensor(indices)
        return ReadBatch((self.inputs[places], self.targets[places]))

    def part(self, task: TrainingTask, step: int, first: int, count: int) -> Pair:
        """Return `count` samples from place `first` of the global batch of a step, read as a loader reads them."""
        start = step % task.batches * task.global_batch + first
        inputs, targets = self.__getitems__(range(start, start + count))
        return inputs, targets


class ReadBatch(tuple[torch.Tensor, torch.Tensor]):
    """A whole batch, which needs no collating."""

    __slots__ = ()


def collate(samples: Any) -> Any:
    """Return a batch of samples; a batch that was read at once stays as it is."""
    return tuple(samples) if isinstance(samples, ReadBatch) else tuple(default_collate(samples))


def model_of(task: TrainingTask) -> nn.Sequential:
    """Build the model, the same in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(task.depth - 1):
        layers += [nn.Linear(task.width, task.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(task.width, OUTPUTS))
    return model.double() if task.double else model


def optimizer_of(task: TrainingTask, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of the task."""
    if task.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Any, batch: Pair) -> torch.Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
