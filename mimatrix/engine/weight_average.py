"""EMA and SWA as the script sees them: `run.ema` and `run.swa`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from torch import nn

from mimatrix.comm.control.user_calls import Caller, UserCall
from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.modules.averaged_weights import AveragedWeights, AverageRegistry, check_same_updates
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.user_calls import run_call
from mimatrix.engine.zero.strategy import ShardingStrategy


class LoopBetweenBatches(Protocol):
    """The training loop, as far as an average needs it."""

    strategy: ShardingStrategy

    def check_between_batches(self, call: str) -> None:
        """Refuse a call inside a global batch."""

    def require_all_ranks(self, call: str) -> None:
        """Refuse a call to which a rank without data does not come."""


class WeightAverage:
    """An average of the model's weights, in every stage; `run.save` and `run.load` include it.

    Each rank averages what it owns of the weights. Buffers, such as the statistics of batch norm, are the model's.
    """

    def __init__(
        self,
        average: AveragedWeights,
        registry: AverageRegistry,
        *,
        model: nn.Module,
        loop: LoopBetweenBatches,
        exchange: RankExchange,
        caller: Caller,
    ) -> None:
        self._average, self._registry = average, registry
        self._model, self._loop, self._exchange, self._caller = model, loop, exchange, caller

    @property
    def updates(self) -> int:
        """How often the weights were added; the first time they were copied."""
        return self._average.updates

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages as its weights for the time of a `with` block. All ranks call it.

        Raises:
            UserError: Inside a global batch, or inside another such block.

        Example:
            >>> with ema.applied():
            ...     results = run.evaluate(model, dataset, metric_fn)
        """
        with self._calling("applied"):
            self._check("applied")
            self._registry.check_not_applied(f"{self._average.kind}.applied was called")
            self._swap()
        self._registry.applied = self._average
        try:
            yield
        except BaseException:
            self._registry.applied = None
            # The other ranks may not come here: what went wrong in the block is what the user has to see.
            with suppress(WorldError, UserError), self._caller.calling(self._end_of_block()):
                self._swap()
            raise
        self._registry.applied = None
        with self._caller.calling(self._end_of_block()):
            self._swap()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages and the model's buffers on the CPU, under the model's names. All ranks call it."""
        with self._calling("full_state_dict"):
            if self._registry.applied is self._average:
                self._check("full_state_dict")
                return self._loop.strategy.full_state_dict(self._model)
            with self.applied():
                return self._loop.strategy.full_state_dict(self._model)

    def _calling(self, method: str) -> AbstractContextManager[None]:
        """Name a call, for ranks that do not make it."""
        return self._caller.calling(run_call(f"{self._average.kind}.{method}"))

    def _end_of_block(self) -> UserCall:
        name = f"{self._average.kind}.applied"
        return UserCall(name, key=f"the end of {name}", verb="left", fix=f"leave {name} on all ranks")

    def _swap(self) -> None:
        self._average.swap()
        self._loop.strategy.reload_params()

    def _check(self, method: str) -> None:
        """Refuse a collective call at the wrong moment, and averages that differ between ranks."""
        call = f"{self._average.kind}.{method}"
        self._loop.check_between_batches(call)
        self._loop.require_all_ranks(call)
        updates = [message["updates"] for message in self._exchange.all_gather({"updates": self.updates})]
        check_same_updates(self._average.kind, updates)


class EMA(WeightAverage):
    """An exponential moving average (EMA), which every step of the optimizer updates; `run.ema` returns it."""


class SWA(WeightAverage):
    """An equal average of the weights at the times of `update` (SWA); `run.swa` returns it."""

    def update(self) -> None:
        """Add the weights as they are now. All ranks call it, between global batches, such as after each epoch.

        Raises:
            UserError: Inside a global batch, or where a rank without data does not come to it.
        """
        with self._calling("update"):
            self._check("update")
            self._registry.check_not_applied("swa.update was called")
            self._average.update()
