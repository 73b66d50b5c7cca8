"""Two small tasks to train groups on: handwritten digits, and a synthetic one whose best possible accuracy is known."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix

_CLASSES, _WIDTH, _TRAIN, _TEST = 10, 20, 4000, 5000


@dataclass(frozen=True)
class Task:
    """What is learned, and how."""

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    epochs: int
    lr: float
    best: float | None = None
    """The accuracy that nobody can beat, in percent."""

    def model(self, seed: int) -> nn.Module:
        """Return a small net, the same for a seed."""
        torch.manual_seed(seed)
        width = self.train[0].shape[1]
        return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, _CLASSES))

    def accuracy(self, model: nn.Module) -> float:
        """On the samples that were not learned, in percent."""
        with torch.no_grad():
            return float((model(self.test[0]).argmax(1) == self.test[1]).double().mean()) * 100


def digits(seed: int) -> Task:
    """Scikit-learn's, a part of them for testing."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    inputs, targets = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1280], order[1280:]
    return Task("digits", (inputs[train], targets[train]), (inputs[test], targets[test]), epochs=60, lr=0.05)


def clouds(seed: int) -> Task:
    """Ten clouds that overlap; whoever knows their middles can do no better than `best`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    middles = torch.randn(_CLASSES, _WIDTH, generator=generator)

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.randint(_CLASSES, (count,), generator=generator)
        return middles[targets] + 1.4 * torch.randn(count, _WIDTH, generator=generator), targets

    train, test = drawn(_TRAIN), drawn(_TEST)
    best = float((torch.cdist(test[0], middles).argmin(1) == test[1]).double().mean()) * 100
    return Task("clouds", train, test, epochs=12, lr=0.05, best=best)


TASKS = {"digits": digits, "clouds": clouds}


def train_together(task: Task, seed: int, batch: int) -> float:
    """Train in one process, which gives what all ranks together give, and return the accuracy in percent."""
    run = mimatrix.init(global_batch=batch, plan=None, seed=seed * 100, quiet=True)
    net = task.model(seed)
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=0.9)
    model, optimizer, loader = run.prepare(net, sgd, TensorDataset(*task.train))
    for _ in run.epochs(task.epochs):
        for inputs, targets in loader:
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return task.accuracy(model)
