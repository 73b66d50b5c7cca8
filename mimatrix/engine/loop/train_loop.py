"""The training loop of one rank: one global batch after another, and what ranks tell each other where one ends.

The loader says when a micro-step begins and when the loop asks for more; `run.backward` and the optimizer say the rest.
Ranks without data in a global batch do not run the loop's body and catch up here with what the others did in it.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import CheckpointManager
from mimatrix.engine.checkpoint.state import Progress
from mimatrix.engine.data.position import DataPosition, MicroBatch
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.loop.automatic_saves import AutomaticSaves
from mimatrix.engine.loop.batch_exchange import BatchExchange
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.epoch_cursor import EpochCursor
from mimatrix.engine.loop.global_step import GlobalStep, StepResult
from mimatrix.engine.loop.idle_ranks import IdleRanks
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.loop.preemption import Preempted
from mimatrix.engine.loop.prepared_optimizer import Stepper
from mimatrix.engine.planning.plan_follower import PlanFollower
from mimatrix.engine.step_timer import StepStats
from mimatrix.engine.world import World
from mimatrix.engine.zero.hooks import GradHookCheck
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.engine.zero.units import check_frozen
from mimatrix.planner.model.split import Split

logger = logging.getLogger(__name__)

_MAX_STATS = 1000
"""Steps whose figures are kept."""


class TrainLoop:
    """The state machine behind the user's loop, on one rank."""

    def __init__(
        self,
        world: World,
        *,
        strategy: ShardingStrategy,
        optimizer: ShardedOptimizer,
        stepper: Stepper,
        global_step: GlobalStep,
        source: MicroBatchSource,
        plans: PlanFollower,
        checkpoints: CheckpointManager,
        idle_ranks: IdleRanks,
        lr_schedulers: list[SyncedLRScheduler],
        saves: AutomaticSaves,
        reports: BatchExchange,
        metrics: MetricLog,
        stage: int,
        shares: Shares,
    ) -> None:
        self._world, self.strategy, self.optimizer, self._stepper = world, strategy, optimizer, stepper
        self.global_step, self.source, self.plans = global_step, source, plans
        self.checkpoints, self._idle, self._lr_schedulers = checkpoints, idle_ranks, lr_schedulers
        self._outer, self._saves, self._reports = world.outer, saves, reports
        self.metrics, self.stage, self.shares = metrics, stage, shares
        self.step = 0
        """Global batches done."""
        self._cursor = EpochCursor(source, world.outer)
        self.stats: list[StepStats] = []
        self.grad_norm: float | None = None
        """Of the last global batch, before clipping; None where it was not computed."""
        self._iterator: object | None = None
        """The iterator over the loader that is in use."""
        self._grad_hooks = GradHookCheck(strategy.units, warns=world.rank == 0)
        self._is_closed = False
        self._has_exchanged = True
        """Whether ranks have told each other everything since the last global batch."""

    @property
    def split(self) -> Split:
        """How the next global batch is split over the ranks."""
        return self.source.split_at(self.position)

    @property
    def position(self) -> DataPosition:
        """The next global batch."""
        return self._cursor.position

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside a global batch."""
        return self.global_step.is_open

    # One step

    def end_global_batch(self) -> None:
        """Reduce, agree, step: everything global happens here, once, on all ranks."""
        micro = self.global_step.micro
        assert micro
        assert self.global_step.is_complete
        self.global_step.shadow_remaining_micro_steps()
        self.strategy.finish_reduction(micro.max_micro_steps)
        report = self._reports.report_batch(self.step, micro)
        with self._world.timer.exposed():
            reports = self._reports.gather(report)
        self._idle.catch_up(reports, self.progress)
        self._reports.take_over(reports)
        if self.plans.needs_pace:
            self._update_plan(reports, micro)
        result = self.global_step.agree(reports, self._world.settings.max_grad_norm)
        if result.should_step:
            self.global_step.scale_grads(result.grad_factor)
            self.optimizer.assign_grads(result.touched)
            self._stepper.step(micro)
            self.strategy.all_gather_params()
            self.checkpoints.averages.update()
        elif self._world.rank == 0 and result.weight and not self.global_step.scale.on:
            logger.warning("step %d is left out: its gradient is infinite or NaN", self.step + 1)
        if result.weight:
            self.global_step.scale.update(result.should_step)
        self.optimizer.clear_grads()
        self.strategy.clear()
        self.global_step.clear()
        self._log_grad_norm(result.norm)
        self._reports.merge_metrics(self.step, reports)
        self._advance(micro, result)
        if self._saves.is_last_batch:
            self.close()
            raise Preempted

    def _update_plan(self, reports: Sequence[BatchReport], micro: MicroBatch) -> None:
        paces = [report.pace for report in reports if report.pace]
        # Where groups share their parameters, an epoch ends with the samples of all groups.
        steps_left = None if self._outer else self.source.steps_after(micro, self._cursor.num_epochs)
        self.plans.update(paces, self.source.split_of(micro), self.step, steps_left)

    def _advance(self, micro: MicroBatch, result: StepResult) -> None:
        self._cursor.advance(micro, was_skipped=not result.should_step)
        batches = self.source.split_of(micro).batches
        memory = {**self.strategy.memory(), "optimizer": self.optimizer.state_bytes()}
        stats = self._world.timer.end_step(self.step, batches[self._world.rank], memory)
        self.stats = [*self.stats[1 - _MAX_STATS :], stats]
        self.step += 1
        self._has_exchanged = False
        self._idle.begin_wait(batches, had_data=micro.num_micro_steps > 0)

    def _log_grad_norm(self, norm: float | None) -> None:
        self.grad_norm = norm
        if norm is not None and self._world.rank == 0:
            self.metrics.log_step(self.step, {"grad_norm": norm})

    # What the user's loop does

    def add_lr_scheduler(self, scheduler: LRScheduler) -> SyncedLRScheduler:
        """Take over a scheduler that was made after `run.prepare`. All ranks call it."""
        synced = SyncedLRScheduler(scheduler, self.global_step)
        self._lr_schedulers.append(synced)
        return synced

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Add the gradients of a micro-batch."""
        self.check_open()
        self._world.precision.end()
        counts = self.global_step.backward(loss, weight)
        self._world.timer.end_micro_step()
        self.metrics.set_weight(counts)

    def log(self, values: dict[str, Any]) -> None:
        """Log metrics: of a micro-batch in the loop's body, else of the run."""
        self.metrics.log(values, self.step)

    def on_optimizer_step(self, *, has_lr_scheduler: bool) -> None:
        """End the global batch if it is complete: the loop has called `optimizer.step`."""
        if has_lr_scheduler and not self._lr_schedulers:
            raise UserError(
                "the optimizer has a scheduler that the run does not know, and would step it once per micro-batch; "
                "give it to run.prepare, or to run.prepare_scheduler if it was made after that"
            )
        if not self.global_step.is_open:
            if self._iterator is not None and self.global_step.has_called_step:
                raise UserError("optimizer.step was called twice for one micro-batch; call it once")
            return
        if not self.global_step.has_run_backward:
            raise UserError("optimizer.step came before run.backward; call run.backward(loss) first")
        self.global_step.note_step()
        if self.global_step.is_complete:
            self.end_global_batch()

    def run_epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of epochs up to `count`, each once; one that was left early is over, too."""
        self._cursor.num_epochs, number = count, self._cursor.epoch
        while number < count:
            self._cursor.yielded = number
            yield number
            self._end_last_loop()
            if not self._has_exchanged:
                self._exchange_between_batches()
            number = self._cursor.next_number(number)

    def load(self, folder: str) -> bool:
        """Resume from a checkpoint, if there is one."""
        with self._world.timer.excluded():
            loaded = self.checkpoints.load(folder, self.progress())
        if loaded is None:
            return False
        self.step, position = loaded
        self._cursor.resume(position)
        if self._outer:
            self.strategy.all_gather_params()
        if self.plans.current:
            self.source.restart(self.plans.current.split)
        self._idle.reset_hyperparams()
        return True

    def check_open(self) -> None:
        """Refuse to train after `run.close`."""
        if self._is_closed:
            raise UserError("run.close was called, and training continues; call it last, on all ranks")

    def check_between_batches(self, call: str, when: str = "when `not run.in_batch`") -> None:
        """Refuse what cannot be done inside a global batch."""
        if self.in_batch:
            raise UserError(f"{call} was called inside a global batch; call it {when}")

    def require_all_ranks(self, call: str) -> None:
        """Refuse what needs all ranks, in a loop whose body a rank without data does not run."""
        self._idle.require_all(call, self.progress().idle)

    def progress(self) -> Progress:
        """Return where the run is, for checkpoints."""
        micro = self.global_step.micro
        split = self.source.split_of(micro) if micro else self.split
        idle = tuple(rank for rank, sizes in enumerate(split.micro) if not sizes)
        # An epoch that a loop has left is over, in a resumed script as in this one.
        is_over = self._iterator is None and self._cursor.was_left_early
        position = self._cursor.next_epoch if is_over else self.position
        return Progress(
            step=self.step,
            position=position,
            split=self.source.split_at(position),
            shares=self.shares,
            seed=self._world.settings.seed,
            idle=idle,
        )

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and release what the loop holds besides the model."""
        self._is_closed = True
        self.metrics.finish(self.step)
        try:
            self.checkpoints.wait()
        finally:
            self._stepper.close()
            if self._outer:
                self._outer.close()
            self.strategy.close()
            self._world.close()

    # What the loader calls

    def open_iterator(self) -> object:
        """Begin a loop over the loader, and return what identifies it; an iterator that is still open ends with this.

        An epoch that a loop has left is not taken up again, as with torch's DataLoader; that of a checkpoint is.
        """
        self._end_last_loop()
        self._iterator, self._cursor.draws = object(), 0
        if self._cursor.was_left_early:
            if not self._has_exchanged:
                self._exchange_between_batches()
            self._cursor.begin_next_epoch()
        return self._iterator

    def check_iterator(self, iterator: object) -> None:
        """Refuse to continue with an iterator after another one was begun."""
        if iterator is not self._iterator:
            raise UserError("another loop over the loader has begun since; draw from one iterator at a time")

    def close_iterator(self, iterator: object) -> None:
        """Leave the loop over the loader, for whatever reason; an iterator that has been replaced changes nothing."""
        if iterator is not self._iterator:
            return
        self._iterator = None
        self._world.precision.end()
        if self.global_step.is_untouched:
            self.global_step.abandon()
        elif not self.in_batch:
            self.global_step.leave_loop()
        self._tell_loop_left()

    def detach_iterator(self) -> None:
        """Let the iterator end while the loop is still in the body of its last micro-batch."""
        self._iterator = None

    def begin_epoch(self) -> None:
        """Begin a pass over the samples, or over what is left of them."""
        self.check_open()
        self.checkpoints.averages.check_not_applied("a loop over the loader began")
        check_frozen(self.strategy.units)
        self._grad_hooks.check()
        self.strategy.check_params_in_place()
        self._world.timer.restart()
        self._cursor.begin_pass()

    def draw(self, micro_batches: Iterator[tuple[MicroBatch, Any]]) -> tuple[MicroBatch, Any] | None:
        """Draw the next micro-batch; the time it takes counts as waiting for data."""
        with self._world.timer.data_wait():
            return next(micro_batches, None)

    def finish_micro_step(self) -> None:
        """Finish a micro-step when the loop asks for the next one; refuse if something is missing."""
        self._world.precision.end()
        self.global_step.check_may_draw()
        if self.global_step.micro:
            self.metrics.end_micro_step(float(self.global_step.micro.num_samples))

    def continues(self) -> bool:
        """Return whether the loop continues after a global batch; a rank without data in it does as the others do."""
        micro = self.global_step.micro
        if not self.in_batch:
            self._saves.save_if_due(micro, self.progress)
        if not self._idle.loop_continues(self.progress, had_data=micro is None or micro.num_micro_steps > 0):
            return False
        if self._cursor.is_over:
            self._exchange_between_batches()
            return False
        return True

    def begin_micro_step(self, micro: MicroBatch) -> bool:
        """Begin a micro-step; return False if this rank has no data in its global batch, which then has ended."""
        self.global_step.begin_micro_step(micro)
        self.metrics.begin_micro_step(self.step)
        if micro.num_micro_steps:
            self._cursor.draws += 1
            self._world.timer.begin_micro_step()
            self._world.precision.begin()
            return True
        self.end_global_batch()
        return False

    def end_epoch(self) -> None:
        """End an epoch: the loader has come to its end."""
        self._cursor.begin_next_epoch()
        self._exchange_between_batches()

    def repeats_epoch(self) -> bool:
        """Return whether the loop goes through the samples again: until all groups together had enough."""
        return self._outer is not None and not self._cursor.is_over

    # What ranks tell each other

    def _exchange_between_batches(self) -> None:
        reports = self._reports.gather(self._reports.build(self.step, before=True))
        self._reports.merge_metrics(self.step, reports)
        self._idle.catch_up(reports, self.progress)
        self._has_exchanged = True

    def _end_last_loop(self) -> None:
        """End the last loop over the loader; refuse to continue where it was left inside a global batch."""
        if self.global_step.is_untouched:
            self.global_step.abandon()
        if self.in_batch:
            raise UserError(
                "the loop over the loader was left inside a global batch; leave it after optimizer.step, "
                "when `not run.in_batch`"
            )
        self._cursor.check_drawn(self.global_step.micro)
        self._tell_loop_left()

    def _tell_loop_left(self) -> None:
        """Tell ranks without data that the loop was left; an iterator that is kept does not end by itself."""
        self.metrics.leave_body(self.step)
        if not self.in_batch:
            self._idle.leave_loop(lambda: self._reports.build(self.step, before=True, with_metrics=False))
        else:
            self._idle.forget_leader()
