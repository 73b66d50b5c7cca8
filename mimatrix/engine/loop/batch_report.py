"""What ranks tell each other where they meet: one report of each, at the end of a global batch or of an epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mimatrix.engine.checkpoint.save_calls import SaveCalls
from mimatrix.engine.planning.plan_follower import PaceReport

Sums = Mapping[str, Sequence[float]]
"""By metric: the weighted sum, and the sum of weights."""


@dataclass(frozen=True, slots=True)
class PreemptionReport:
    """Whether this rank was asked to stop, and whether it has saved for that."""

    is_requested: bool
    has_saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Everything that one rank tells the others at one meeting."""

    weight: float = 0.0
    """How much its samples of this global batch count."""
    grad_square: float = 0.0
    """Squared norm of its gradients, where they are clipped or may overflow."""
    touched: Sequence[int] = ()
    """Numbers of the parameters that got a gradient."""
    lr_scheduler_calls: Sequence[int] = ()
    has_bypassed_scheduler: bool = False
    """Whether the loop has stepped the scheduler that was given to `run.prepare`, not the one that it returned."""
    metrics: Mapping[str, Sums] = field(default_factory=dict)
    """By step: sums of what was logged."""
    save_calls: SaveCalls = field(default_factory=SaveCalls)
    hyperparams: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the optimizer that have changed since the last meeting."""
    was_in_body: Sequence[bool] = (True, True)
    """Whether it ran the loop's body after the last global batch, and before this meeting."""
    busy_s: float | None = None
    """How long it has worked in this global batch, where that is known without waiting for a GPU."""
    launch_order: str = ""
    """The order of its gathers and reductions, if that has changed; see `ShardingStrategy.launch_order`."""
    pace: PaceReport | None = None
    preemption: PreemptionReport | None = None
    save_is_due: bool = False
    """Whether a periodic save is due: by the clock of rank 0, or since this rank could not begin it before."""

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the defaults: messages stay small, and travel in one collective."""
        given = {name.name: getattr(self, name.name) for name in fields(self)}
        message = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        for name, kind in _NESTED.items():
            if name in message:
                message[name] = [getattr(message[name], part.name) for part in fields(kind)]
        return message

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> "BatchReport":
        """Read what `to_json` gave."""
        nested = {name: kind for name, kind in _NESTED.items() if name in message}
        parts = {
            name: kind(**dict(zip((part.name for part in fields(kind)), message[name], strict=True)))
            for name, kind in nested.items()
        }
        return cls(**{**message, **parts})


class LaunchOrders:
    """The order of launches that all ranks know, so that it is only told when it changes."""

    def __init__(self) -> None:
        self._agreed = ""

    def news(self, own: str) -> str:
        """Return this rank's order if the others do not know it, else nothing."""
        return own if own != self._agreed else ""

    def agree(self, orders: Sequence[str]) -> str:
        """Return the order that all ranks take from now on: that of the first rank with news; empty if it stays."""
        news = next((order for order in orders if order), "")
        self._agreed = news or self._agreed
        return news


_NESTED: dict[str, type[Any]] = {"save_calls": SaveCalls, "pace": PaceReport, "preemption": PreemptionReport}
_DEFAULTS = {name.name: getattr(BatchReport(), name.name) for name in fields(BatchReport)}
