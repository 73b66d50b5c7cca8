"""One global batch on one rank: micro-steps, then the end at which everything global happens, once, on all ranks.

Ranks may have different numbers of micro-steps, or none; they meet only here (and, in stages 2 and 3, in every
micro-step, which a rank without data joins with zeros).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.data.source import MicroBatch
from mimatrix.engine.modules.precision import LossScale
from mimatrix.engine.rank_exchange import Message, RankExchange
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer
from mimatrix.engine.zero.sharding import OUTSIDE, Zero0
from mimatrix.engine.zero.single import SingleProcess
from mimatrix.engine.zero.zero3 import Zero3


class ShadowStep(Protocol):
    """How a rank without data takes part in what couples samples: it runs the model, and nothing of that counts."""

    def __call__(self) -> None:
        """One micro-step."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks found at the end of a global batch."""

    weight: float
    norm: float | None
    """Of the whole gradient, before clipping; known where it is clipped or may overflow."""
    stepped: bool
    """False where a gradient was not finite and the step was left out."""
    messages: list[Message]


class GlobalStep:
    """Goes through global batches, one after the other."""

    def __init__(
        self,
        sharding: Zero0 | SingleProcess,
        binding: ShardedOptimizer,
        exchange: RankExchange,
        watch: StepTimer,
        *,
        clip_norm: float | None,
        scale: LossScale,
    ) -> None:
        self.sharding, self.binding, self.scale = sharding, binding, scale
        self._exchange, self._watch, self._clip_norm = exchange, watch, clip_norm
        self.ghost: ShadowStep | None = None
        """Set where samples meet in the model."""
        self.micro: MicroBatch | None = None
        """The micro-step in which the user's loop is, or was last."""
        self.is_open = False
        """A global batch has begun and not ended."""
        self.is_ghost = False
        self.went_back = False
        """`backward` was called in this micro-step."""
        self._goes_back = self._seen = False
        self._weight = 0.0
        self._done = 0
        self._step: Callable[[], Any] = binding.optimizer.step
        self.tell: Callable[[], Message] = dict
        """What else this rank has to say to the others at the end."""
        self.hear: Callable[[list[Message]], None] = lambda messages: None  # noqa: ARG005
        """Told what all have said, before the step."""

    def step_by(self, step: Callable[[MicroBatch, Callable[[], object]], None]) -> None:
        """From now on another one steps in place of the optimizer, and may let it."""
        own = self._step

        def stepped() -> None:
            assert self.micro
            with self._watch.apart():
                step(self.micro, own)
            self.binding.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

        self._step = stepped

    def enter(self, micro: MicroBatch) -> None:
        """The next micro-step begins."""
        assert not self.is_open or (self.micro and not self.micro.is_last)
        self.micro, self.is_open, self.went_back = micro, True, False
        if micro.num_micro_steps and isinstance(self.sharding, Zero0):
            self.sharding.begin(micro.is_last)

    def leave(self) -> None:
        """The user's loop goes on without having finished the micro-step: that counts as no gradient."""
        if self.micro and self.is_open and self.micro.num_micro_steps and not self.went_back:
            self._finish()

    def backward(self, loss: torch.Tensor, weight: float | None) -> float:
        """Gradients of a loss that is a mean over the micro-batch; the weight with which it counts."""
        micro = self._checked(loss)
        counts = float(micro.num_samples if weight is None else weight)
        if not math.isfinite(counts) or counts < 0:
            raise UserError(f"weight is {weight!r}; give how much the micro-batch counts, such as its number of tokens")
        self.went_back = True
        if isinstance(self.sharding, Zero3):
            self._check_first(loss, counts)
            self.sharding.back()
        # A mean over nothing is no number, and counts nothing. Where samples meet in the model others wait for it.
        if counts or self.ghost:
            self._goes_back = True
            # Divided by what a whole global batch usually weighs: then mostly nothing is left to be scaled at the end.
            (loss * (counts / micro.global_samples * self.scale.value)).backward()  # type: ignore[no-untyped-call]
            self._goes_back = False
        self._finish()
        self._weight += counts
        return counts

    def arrived(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient."""
        assert isinstance(self.sharding, Zero0)
        if self.is_ghost:
            parameter.grad = None
            self.sharding.passed(parameter)
            return
        if not self._goes_back:
            raise UserError(OUTSIDE)
        self.sharding.arrived(parameter)

    @property
    def may_end(self) -> bool:
        """Whether this rank has done all its micro-steps of the global batch."""
        return self.is_open and self.micro is not None and self.micro.is_last

    def end(self) -> StepResult:
        """The global batch ends: reduce, agree, step. A collective."""
        micro = self.micro
        assert micro
        assert self.may_end
        self._join_rest(micro.max_micro_steps)
        if isinstance(self.sharding, Zero0):
            self.sharding.end(micro.max_micro_steps)
        mine = {"weight": self._weight, "square": self._square(), "touched": self.sharding.touched(), **self.tell()}
        with self._watch.apart():
            messages = self._exchange.all(mine)
        self.hear(messages)
        outcome = self._agreed(micro, messages)
        if outcome.stepped:
            self._stepped(outcome, micro)
        if outcome.weight:
            self.scale.update(outcome.stepped)
        self._clear()
        return outcome

    def _checked(self, loss: torch.Tensor) -> MicroBatch:
        if not self.is_open or self.micro is None:
            raise UserError("run.backward was called outside of the loop over the loader; call it once per micro-batch")
        if self.went_back:
            raise UserError("run.backward was called twice for one micro-batch; add the losses and call it once")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UserError(f"the loss has the shape {shape}; give run.backward a scalar, such as loss.mean()")
        if not loss.requires_grad:
            raise UserError("the loss does not depend on any parameter that learns; compute it from the model's output")
        return self.micro

    def _check_first(self, loss: torch.Tensor, counts: float) -> None:
        """A parameter that is not here has no number. One look, since a GPU is waited for."""
        if not self._seen and counts and bool(loss.detach().isnan()):
            raise UserError(
                "the first loss is not a number; if it is one in stage 2, a parameter is used outside of its module: "
                "use stage 2, or name the class of the module that uses it: run.prepare(..., whole=(TheClass,))"
            )
        self._seen = True

    def _finish(self) -> None:
        self._done += 1
        if isinstance(self.sharding, Zero0):
            self.sharding.finish()

    def _join_rest(self, rounds: int) -> None:
        """Where samples meet in the model, a rank that has fewer micro-steps runs it for the others' sake."""
        if self.ghost is None:
            return
        gathers = isinstance(self.sharding, Zero0) and self.sharding.stage >= 2
        for _ in range(self._done, rounds):
            self.is_ghost = True
            if gathers and isinstance(self.sharding, Zero0):
                self.sharding.begin(last=True)
            self.ghost()
            if gathers and isinstance(self.sharding, Zero0):
                self.sharding.finish()
            self.is_ghost = False

    def _square(self) -> float:
        if self._clip_norm is None and not self.scale.on:
            return 0.0
        norms = [torch.linalg.vector_norm(each) for each in self.sharding.gradients() if each.numel()]
        return float(torch.stack([norm.double() for norm in norms]).square().sum()) if norms else 0.0

    def _agreed(self, micro: MicroBatch, messages: list[Message]) -> StepResult:
        weight = math.fsum(message["weight"] for message in messages)
        # Uncut gradients are the same on every rank; cut ones are each rank's own part.
        squares = [message["square"] for message in messages]
        square = math.fsum(squares) if self.sharding.parts else squares[0]
        factor = micro.global_samples / weight / self.scale.value if weight else 0.0
        wants = self._clip_norm is not None or self.scale.on
        finite = math.isfinite(square)
        return StepResult(
            weight, math.sqrt(square) * factor if wants and finite else None, finite and weight > 0, messages
        )

    def _stepped(self, outcome: StepResult, micro: MicroBatch) -> None:
        factor = micro.global_samples / outcome.weight / self.scale.value
        if self._clip_norm is not None and outcome.norm is not None:
            factor *= min(1.0, self._clip_norm / (outcome.norm + 1e-6))
        if factor != 1.0:
            gradients = [each for each in self.sharding.gradients() if each.numel()]
            if gradients:
                torch._foreach_mul_(gradients, factor)
            if isinstance(self.sharding, Zero0):
                self.sharding.scaled()
        if isinstance(self.sharding, Zero0):
            self.binding.give({index for message in outcome.messages for index in message["touched"]})
        self._step()
        if isinstance(self.sharding, Zero0):
            with torch.no_grad():
                self.sharding.publish()

    def _clear(self) -> None:
        self.binding.take_away()
        self.sharding.clear()
        self.is_open = False
        self._weight, self._done = 0.0, 0
