"""A part of the parameters with its optimizer: pushes change it, pulls copy it."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.hybrid.ledger import Applied, Ledger, Push
from mimatrix.hybrid.rules import Rules

Settings = Mapping[str, Any]
"""Of one of the optimizer's groups of parameters: `lr` and the like."""
_GATHERED = ("momentum_buffer",)
"""What optimizers keep that has the size of a step."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Parameters of one version; nobody changes them any more."""

    values: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class Stepping:
    """How a shard is stepped: the class of the user's optimizer, and elements and settings of each of its groups."""

    kind: type[Optimizer]
    groups: tuple[tuple[int, Settings], ...]

    def made(self, flat: torch.Tensor) -> Optimizer:
        """An optimizer of that class, whose parameters are parts of a flat tensor."""
        parts = torch.split(flat, [count for count, _ in self.groups])
        groups = [
            {**settings, "params": [nn.Parameter(part)] if part.numel() else []}
            for part, (_, settings) in zip(parts, self.groups, strict=True)
        ]
        return self.kind(groups)


class Shard:
    """Flat parameters from some element on to another.

    Double-buffered: a push is worked into one copy while pulls read the other, so that nobody reads half an update.
    """

    def __init__(self, values: torch.Tensor, stepping: Stepping, rules: Rules) -> None:
        self._values = values.detach().clone()
        self._optimizer = stepping.made(self._values)
        self._rules = rules
        self._factor: float | None = None
        self._usual = [dict(settings) for _, settings in stepping.groups]
        self._lock = Lock()
        self.ledger = Ledger()
        self._shown = Pulled(self._values.clone(), 0)

    def pull(self) -> Pulled:
        """The newest whole version."""
        return self._shown

    def push(
        self,
        push: Push,
        gradient: torch.Tensor,
        settings: Sequence[Settings] = (),
        mirrored: Callable[[], None] = lambda: None,
    ) -> Applied:
        """Step by a group's mean gradient; `settings`: what its schedulers say now, for each group of parameters.

        Nobody pulls the new version before `mirrored` is back: what was seen must not be lost.
        """
        with self._lock:
            known = self.ledger.known(push)
            if known:
                return known
            factor = self._rules.factor(push.nominal, self.ledger.staleness(push), self.ledger.samples)
            self._step(gradient, factor, settings or self._usual)
            found = self.ledger.enter(push)
            mirrored()
            self._shown = Pulled(self._values.clone(), found.version)
            return found

    def save(self) -> bytes:
        """All of it at one version."""
        with self._lock:
            buffer = io.BytesIO()
            state = {
                "values": self._values,
                "optimizer": self._optimizer.state_dict(),
                "factor": self._factor,
                "ledger": self.ledger.to_json(),
            }
            torch.save(state, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        """Go on from there."""
        state: dict[str, Any] = torch.load(io.BytesIO(saved), weights_only=True)
        with self._lock:
            self._values.copy_(state["values"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._factor = state["factor"]
            self.ledger = Ledger.from_json(state["ledger"])
            self._shown = Pulled(self._values.clone(), self.ledger.version)

    def _step(self, gradient: torch.Tensor, factor: float, settings: Sequence[Settings]) -> None:
        self._correct(self._rules.correction(self._factor, factor))
        self._factor = factor
        groups = self._optimizer.param_groups
        sizes = [sum(each.numel() for each in group["params"]) for group in groups]
        for group, now, part in zip(groups, settings, torch.split(gradient, sizes), strict=True):
            group.update({name: _like(value, group[name]) for name, value in now.items() if name in group})
            group["lr"] = now["lr"] * factor
            for parameter in group["params"]:
                parameter.grad = part
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _correct(self, by: float) -> None:
        if by == 1.0:
            return
        for state in self._optimizer.state.values():
            for name in _GATHERED:
                if isinstance(state.get(name), torch.Tensor):
                    state[name].mul_(by)


def _like(value: Any, known: Any) -> Any:
    """JSON has lists where optimizers have tuples."""
    return tuple(value) if isinstance(known, tuple) else value
