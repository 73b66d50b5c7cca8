"""A part of the parameters with its optimizer: pushes change it, pulls copy it."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.hybrid.ledger import Applied, Ledger, Push
from mimatrix.hybrid.rules import Rules

Makes = Callable[[list[nn.Parameter]], Optimizer]
_GATHERED = ("momentum_buffer",)
"""What optimizers keep that has the size of a step."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Parameters of one version; nobody changes them any more."""

    values: torch.Tensor
    version: int


class Shard:
    """Flat parameters from some element on to another.

    Double-buffered: a push is worked into one copy while pulls read the other, so that nobody reads half an update.
    """

    def __init__(self, values: torch.Tensor, makes: Makes, rules: Rules) -> None:
        self._value = nn.Parameter(values.detach().clone())
        self._optimizer = makes([self._value])
        self._rules = rules
        self._factor: float | None = None
        self._usual = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._lock = Lock()
        self.ledger = Ledger()
        self._shown = Pulled(self._value.detach().clone(), 0)

    def pull(self) -> Pulled:
        """The newest whole version."""
        return self._shown

    def push(
        self,
        push: Push,
        gradient: torch.Tensor,
        settings: Mapping[str, float] | None = None,
        mirrored: Callable[[], None] = lambda: None,
    ) -> Applied:
        """Step by a group's mean gradient; `settings`: what its scheduler says now (`lr` and the like).

        Nobody pulls the new version before `mirrored` is back: what was seen must not be lost.
        """
        with self._lock:
            known = self.ledger.known(push)
            if known:
                return known
            factor = self._rules.factor(push.samples, self.ledger.staleness(push), self.ledger.samples)
            self._step(gradient, factor, settings or {})
            found = self.ledger.enter(push)
            mirrored()
            self._shown = Pulled(self._value.detach().clone(), found.version)
            return found

    def save(self) -> bytes:
        """All of it at one version."""
        with self._lock:
            buffer = io.BytesIO()
            state = {
                "values": self._value.detach(),
                "optimizer": self._optimizer.state_dict(),
                "factor": self._factor,
                "ledger": self.ledger.to_json(),
            }
            torch.save(state, buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        """Go on from there."""
        state: dict[str, Any] = torch.load(io.BytesIO(saved), weights_only=True)
        with self._lock, torch.no_grad():
            self._value.copy_(state["values"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._factor = state["factor"]
            self.ledger = Ledger.from_json(state["ledger"])
            self._shown = Pulled(self._value.detach().clone(), self.ledger.version)

    def _step(self, gradient: torch.Tensor, factor: float, settings: Mapping[str, float]) -> None:
        self._correct(self._rules.correction(self._factor, factor))
        self._factor = factor
        for group, usual in zip(self._optimizer.param_groups, self._usual, strict=True):
            group.update({name: value for name, value in settings.items() if name in group and name != "lr"})
            group["lr"] = settings.get("lr", usual) * factor
        self._value.grad = gradient
        self._optimizer.step()
        self._value.grad = None

    def _correct(self, by: float) -> None:
        if by == 1.0:
            return
        for state in self._optimizer.state.values():
            for name in _GATHERED:
                if isinstance(state.get(name), torch.Tensor):
                    state[name].mul_(by)
