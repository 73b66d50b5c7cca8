"""The global batch that a rank is in: its micro-steps, their gradients, and what all ranks then agree on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import MicroBatch
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.hidden_grads import HiddenGrads
from mimatrix.engine.modules.precision import LossScale
from mimatrix.engine.zero.guarded_params import GuardedParams
from mimatrix.engine.zero.strategy import GRAD_OUTSIDE_BACKWARD, ShardingStrategy


class ShadowStep:
    """Runs the model on a rank that has no data left, for the other ranks' batch norm; none of it counts."""

    def __init__(self, run_model: Callable[[], None]) -> None:
        self._run_model = run_model
        self.is_active = False

    def run(self, strategy: ShardingStrategy, *, reduces: bool) -> None:
        """Take part in one micro-step of the others, in which gradients may be reduced."""
        self.is_active = True
        if reduces:
            strategy.begin_micro_step(is_last=True)
        self._run_model()
        if reduces:
            strategy.end_micro_step()
        self.is_active = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks found at the end of a global batch."""

    weight: float
    norm: float | None
    """Of the whole gradient, before clipping; known where it is clipped or may overflow."""
    should_step: bool
    """Whether there is something to step by: samples, and no gradient that is infinite or NaN."""
    grad_factor: float
    """What gradients are multiplied by before the step: weights, loss scale and clipping."""
    touched: frozenset[int]
    """Numbers of the parameters that got a gradient on any rank."""

    @classmethod
    def agree(
        cls,
        reports: Sequence[BatchReport],
        *,
        samples: int,
        scale: LossScale,
        max_grad_norm: float | None,
        grads_are_sharded: bool,
    ) -> "StepResult":
        """Work out the same result on every rank from the reports of all."""
        weight = math.fsum(report.weight for report in reports)
        # Gradients that are not sharded are the same on every rank; sharded ones are each rank's own part.
        squares = [report.grad_square for report in reports]
        square = math.fsum(squares) if grads_are_sharded else squares[0]
        factor = samples / weight / scale.value if weight else 0.0
        is_finite = math.isfinite(square)
        norm = math.sqrt(square) * factor if max_grad_norm is not None or scale.on else None
        if max_grad_norm is not None and norm is not None and is_finite:
            factor *= min(1.0, max_grad_norm / (norm + 1e-6))
        touched = frozenset(index for report in reports for index in report.touched)
        return cls(weight, norm, is_finite and weight > 0, factor, touched)


class GlobalStep:
    """The micro-steps of one global batch after the other, as this rank has them."""

    def __init__(
        self,
        strategy: ShardingStrategy,
        scale: LossScale,
        shadow: ShadowStep | None,
        *,
        grads: HiddenGrads,
        params: GuardedParams,
    ) -> None:
        self.strategy, self.scale, self._shadow, self._grads, self._params = strategy, scale, shadow, grads, params
        self.micro: MicroBatch | None = None
        """The micro-step in which the user's loop is, or was last; None before the first."""
        self.is_open = False
        """A global batch has begun and not ended."""
        self.has_run_backward = False
        """`backward` was called in this micro-step."""
        self.has_called_step = False
        """`optimizer.step` was called in this micro-step."""
        self.weight = 0.0
        """Of the micro-steps of this global batch."""
        self._in_backward = False
        self._done = 0

    @property
    def is_complete(self) -> bool:
        """Whether this rank has done all its micro-steps of the global batch."""
        return self.is_open and self.micro is not None and self.micro.is_last

    def begin_micro_step(self, micro: MicroBatch) -> None:
        """Begin the next micro-step."""
        assert not self.is_open or (self.micro and not self.micro.is_last)
        if not self.is_open:
            self._grads.restore()
        self.micro, self.is_open = micro, True
        self._params.release()
        self.has_run_backward = self.has_called_step = False
        if micro.num_micro_steps:
            self.strategy.begin_micro_step(is_last=micro.is_last and not self._reduces_in_shadow(micro))

    def check_may_draw(self) -> None:
        """Refuse to draw the next micro-batch while something is missing for this one."""
        if not self.is_open or self.micro is None or not self.micro.num_micro_steps:
            return
        if not self.has_run_backward:
            raise UserError(
                "a second micro-batch was drawn before run.backward was called for the first; call run.backward(loss) "
                "for each (with weight=0 to leave one out), or give run.prepare read_ahead=True if the loop reads one "
                "batch ahead"
            )
        if self.is_complete:
            raise UserError(
                "the next global batch was drawn before optimizer.step was called for this one; call optimizer.step() "
                "after each run.backward (gradients are accumulated up to global_batch samples without further code)"
            )

    def check_may_clear_grads(self) -> None:
        """Refuse `zero_grad` where a plain loop would lose a gradient that no step has used."""
        if self.is_open and self.has_run_backward and not self.has_called_step:
            raise UserError(
                "zero_grad was called between run.backward and optimizer.step, where it would drop the gradient; call "
                "it after optimizer.step, or give run.backward weight=0 to leave a micro-batch out"
            )

    def note_step(self) -> None:
        """Note that the loop has called `optimizer.step`, after which it may call `zero_grad`."""
        if not self.has_called_step:
            self._grads.check()
        self.has_called_step = True
        if self.is_complete:
            self._grads.restore()

    def abandon(self) -> None:
        """Forget a global batch of which the loop has only looked at the first micro-batch."""
        self.strategy.clear()
        self.clear()
        self.leave_loop()

    @property
    def is_untouched(self) -> bool:
        """Whether this rank has drawn the first micro-batch of the global batch and done nothing with it."""
        return self.is_open and not self._done and not self.has_run_backward

    def backward(self, loss: torch.Tensor, weight: float | None) -> float:
        """Add the gradients of a mean loss over the micro-batch; return the weight with which it counts."""
        micro = self._check(loss)
        counts = float(micro.num_samples if weight is None else weight)
        if not math.isfinite(counts) or counts < 0:
            raise UserError(f"weight is {weight!r}; give how much the micro-batch counts, such as its number of tokens")
        self.has_run_backward = True
        self._grads.restore()
        self.strategy.begin_backward(loss if counts else None)
        # A mean over nothing is NaN, and counts nothing; but other ranks may wait for this one's batch norm.
        if counts or self._shadow:
            self._in_backward = True
            # Divided by what a whole global batch usually weighs: mostly nothing is left to scale at the end.
            (loss * (counts / micro.global_samples * self.scale.value)).backward()  # type: ignore[no-untyped-call]
            self._in_backward = False
        self._done += 1
        self.strategy.end_micro_step()
        self._grads.hide()
        if not micro.is_last:
            self._params.guard()
        self.weight += counts
        return counts

    def on_grad(self, param: nn.Parameter) -> None:
        """Hand a gradient that autograd has just accumulated to the strategy."""
        if self._shadow and self._shadow.is_active:
            param.grad = None
            self.strategy.grad_skipped(param)
            return
        if not self._in_backward:
            raise UserError(GRAD_OUTSIDE_BACKWARD)
        self.strategy.grad_ready(param)

    def shadow_remaining_micro_steps(self) -> None:
        """Run the model for the others' batch norm, where they have more micro-steps than this rank."""
        if self._shadow is None or self.micro is None:
            return
        for number in range(self._done, self.micro.max_micro_steps):
            is_last = number + 1 == self.micro.max_micro_steps
            reduces_now = is_last and self._reduces_in_shadow(self.micro)
            self._shadow.run(self.strategy, reduces=reduces_now or self.strategy.reduces_every_micro_step)

    def _reduces_in_shadow(self, micro: MicroBatch) -> bool:
        """Whether this rank reduces its gradients in the last micro-step of the others, in which it has no data.

        So all ranks launch reductions and what couples samples in one order: NCCL needs that.
        """
        has_shadows = self._shadow is not None and micro.num_micro_steps < micro.max_micro_steps
        return has_shadows and self.strategy.launches_in_order

    def grad_square(self, max_grad_norm: float | None) -> float:
        """Return the squared norm of this rank's gradients where they are clipped or may overflow, otherwise 0."""
        if max_grad_norm is None and not self.scale.on:
            return 0.0
        norms = [torch.linalg.vector_norm(grad) for grad in self.strategy.local_grads() if grad.numel()]
        return float(torch.stack([norm.double() for norm in norms]).square().sum()) if norms else 0.0

    def agree(self, reports: Sequence[BatchReport], max_grad_norm: float | None) -> StepResult:
        """Work out the result of the global batch, the same on every rank."""
        assert self.micro
        return StepResult.agree(
            reports,
            samples=self.micro.global_samples,
            scale=self.scale,
            max_grad_norm=max_grad_norm,
            grads_are_sharded=self.strategy.grads_are_sharded,
        )

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's gradients by the factor that all ranks agreed on."""
        if factor == 1.0:
            return
        grads = [grad for grad in self.strategy.local_grads() if grad.numel()]
        if grads:
            torch._foreach_mul_(grads, factor)
        self.strategy.grads_scaled()

    def clear(self) -> None:
        """Close the global batch. A plain loop would still have its gradients, so they stay hidden."""
        self._grads.restore()
        self._params.release()
        self.is_open = False
        self.weight, self._done = 0.0, 0
        self._grads.hide()

    def leave_loop(self) -> None:
        """Leave gradients and parameters to the script: the loop over the loader was left."""
        self._grads.restore()
        self._params.release()

    def _check(self, loss: torch.Tensor) -> MicroBatch:
        if not self.is_open or self.micro is None:
            raise UserError(
                "run.backward was called outside the loop over the loader, or before the loop drew the next batch with "
                "read_ahead=True; call it once per micro-batch"
            )
        if self.has_run_backward:
            raise UserError("run.backward was called twice for one micro-batch; add the losses and call it once")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UserError(f"the loss has the shape {shape}; give run.backward a scalar, such as loss.mean()")
        if not loss.requires_grad:
            raise UserError("the loss does not depend on any trainable parameter; compute it from the model's output")
        return self.micro
