"""The user's learning-rate scheduler, prepared to step between global batches and equally often on every rank."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.global_step import GlobalStep
from mimatrix.engine.rank_exchange import RankExchange


class SyncedLRScheduler(LRScheduler):
    """The user's lr scheduler, stepping between global batches only, and equally often on every rank.

    Everything but `step` is the wrapped scheduler's own, which is in `scheduler`: attributes are read and set there.
    """

    scheduler: LRScheduler
    calls: int
    """How often it was stepped."""
    _OWN = ("scheduler", "calls", "_global_step", "_position")

    def __init__(self, scheduler: LRScheduler, global_step: GlobalStep) -> None:
        # Not LRScheduler's constructor, which would take the optimizer over.
        self.scheduler, self._global_step = scheduler, global_step
        self.calls = 0
        self._position = _position(scheduler)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is being unpickled or copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.scheduler, name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheduler!r})"

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler; does nothing inside a global batch."""
        if self._global_step.is_complete:
            raise UserError("scheduler.step came before optimizer.step; call optimizer.step() first")
        if not self._global_step.is_open:
            self._step(*args, **kwargs)

    def get_lr(self) -> list[Any]:
        """Return the learning rates that the wrapped scheduler computes."""
        return self.scheduler.get_lr()

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)
        self._position = _position(self.scheduler)

    def restore(self, state_dict: dict[str, Any], calls: int) -> None:
        """Load the state of a checkpoint, and how often the scheduler had been stepped."""
        self.load_state_dict(state_dict)
        self.calls = calls

    @property
    def needs_metric(self) -> bool:
        """Whether it steps by a metric, which a rank without data does not have."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def catch_up(self, calls: Sequence[int]) -> None:
        """Step as often as on the other ranks, if this rank did not run the loop's body."""
        if self.needs_metric and min(calls) < max(calls):
            raise UserError(
                "ReduceLROnPlateau steps by a metric, which a rank without data does not have; "
                "step it after the loop over the loader, with a metric of run.evaluate"
            )
        while self.calls < max(calls):
            self._step()

    @property
    def is_bypassed(self) -> bool:
        """Whether the wrapped scheduler was stepped directly, which would happen in every micro-batch."""
        return _position(self.scheduler) != self._position

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        self.scheduler.step(*args, **kwargs)
        self._position = _position(self.scheduler)


def check_lr_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Refuse what is not one learning-rate scheduler of the optimizer, or of the one that was prepared from it."""
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
        raise UserError(
            f"the scheduler is a {type(scheduler).__name__}; give one scheduler, such as a ChainedScheduler or a "
            "SequentialLR of several, or pass each to run.prepare_scheduler"
        )
    own = getattr(scheduler, "optimizer", None)
    if not isinstance(own, Optimizer):  # a scheduler of the user's own making
        return
    # By the param groups, in which it sets the learning rates: a wrapper of the optimizer has the same ones.
    if not any(group is other for group in own.param_groups for other in optimizer.param_groups):
        raise UserError(
            f"the {type(scheduler).__name__} is a scheduler of another optimizer; make it of the one that is given to "
            "run.prepare, or that run.prepare returned"
        )


def check_same_lr_scheduler(exchange: RankExchange, scheduler: object) -> None:
    """Refuse schedulers that differ between ranks, before they are stepped together. A collective."""
    own = "no scheduler" if scheduler is None else f"a {type(scheduler).__name__}"
    kinds = [message["scheduler"] for message in exchange.all_gather({"scheduler": own})]
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise UserError(
                f"rank 0 prepared {kinds[0]} and rank {rank} {other}; prepare the same scheduler on all ranks"
            )


def _position(scheduler: LRScheduler) -> list[Any]:
    """Return how far a scheduler is, or the schedulers that it chains."""
    chained = getattr(scheduler, "_schedulers", ())
    return [getattr(scheduler, "last_epoch", None), *(_position(each) for each in chained)]
