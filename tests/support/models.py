"""Small models in float64, with the cases that make sharding hard: tied weights, frozen and unused parameters."""

import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, WORDS, LENGTH = 6, 13, 5
_SEEDING = threading.Lock()
"""Ranks may be threads, which share one random generator."""


class Perceptron(nn.Module):
    """Three layers, one of them frozen, a parameter that is never used, and one used in some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(WIDTH, 11), nn.Linear(11, 7), nn.Linear(7, 3)
        self.frozen.requires_grad_(False)
        self.never = nn.Parameter(torch.ones(4))
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        chosen = (x[:, :1] > 1.0).to(y.dtype)
        return y + chosen * self.sometimes if bool(chosen.any()) else y


class Residual(nn.Module):
    """A small ResNet: convolutions with batch norm, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.inner, self.inner_norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, affine=False)
        self.side, self.side_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.inner_norm(self.inner(x)) + self.side_norm(self.side(x)))
        y: torch.Tensor = self.head(x.mean((2, 3)))
        return y


class Transformer(nn.Module):
    """One block, with its word vectors tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        y: torch.Tensor = self.output(self.norm(self.block(x, src_key_padding_mask=tokens == 0)))
        return y


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def token_cross_entropy(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens that are not padding."""
    return F.cross_entropy(model(tokens).transpose(1, 2), tokens, ignore_index=0)


def vectors(count: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(WIDTH, generator=generator, dtype=torch.float64), number % 3) for number in range(count)]


def images(count: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(6)
    return [(torch.randn(2, 4, 4, generator=generator, dtype=torch.float64), number % 3) for number in range(count)]


def sentences(count: int) -> list[torch.Tensor]:
    """Return token sequences, padded with zeros to one length."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)
    return [row * (torch.arange(LENGTH) < length) for row, length in zip(rows, lengths, strict=True)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with two param groups."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() > 1]
    others = [parameter for parameter in trainable if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    slower = {"params": trainable[1::2], "lr": 0.02, "nesterov": True}
    groups: list[dict[str, Any]] = [{"params": trainable[::2]}, slower]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def seeded_perceptron() -> tuple[Perceptron, torch.optim.Optimizer]:
    """Return the same perceptron on every rank, in float64, and an optimizer for it."""
    with _SEEDING:
        torch.manual_seed(3)
        model = Perceptron()
        model.double()
    return model, momentum(model)
