"""The training loop of one rank: one global batch after another, and what ranks tell each other where one ends.

The loader says when a micro-step begins and when the loop asks for more; `run.backward` and the optimizer say the rest.
Ranks without data in a global batch do not run the loop's body and catch up here with what the others did in it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import DEFAULT_KEEP, CheckpointManager
from mimatrix.engine.checkpoint.state import Progress
from mimatrix.engine.checkpoint.storage import CheckpointInfo
from mimatrix.engine.data.source import DataPosition, MicroBatch, MicroBatchSource
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.global_step import GlobalStep, StepResult
from mimatrix.engine.loop.idle_ranks import IdleRanks, SyncedLRScheduler
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.loop.preemption import Preempted, Preemption
from mimatrix.engine.loop.prepared_optimizer import Stepper
from mimatrix.engine.planning.plan_follower import PlanFollower
from mimatrix.engine.step_timer import StepStats
from mimatrix.engine.world import World
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.engine.zero.units import check_frozen
from mimatrix.planner.plan import Plan
from mimatrix.planner.profile import Measurements
from mimatrix.planner.split import Split

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
        lr_schedulers: Sequence[SyncedLRScheduler],
        preemption: Preemption | None,
        stage: int,
        shares: Shares,
    ) -> None:
        self._world, self.strategy, self.optimizer, self._stepper = world, strategy, optimizer, stepper
        self.global_step, self.source, self._plans = global_step, source, plans
        self.checkpoints, self._idle, self._lr_schedulers = checkpoints, idle_ranks, lr_schedulers
        self._outer, self._preemption = world.outer, preemption
        self.stage, self.shares = stage, shares
        self.step = 0
        """Global batches done."""
        self.position = DataPosition(0, 0)
        """The next global batch."""
        self.metrics = MetricLog(shows=world.rank == 0 and not world.settings.quiet)
        self.stats: list[StepStats] = []
        self._num_epochs: int | None = None
        """How many there will be, if the loop has said so."""
        self._has_called_step = False
        self._backward_calls = 0
        self._has_ended_batch = False
        self._epoch_in_loop = self._first_epoch = 0
        """The epoch that `run.epochs` gave last, and the one in which the loop over the loader began."""
        self._skipped_samples = 0
        """Samples of steps that were left out, which other groups do not count."""
        self._has_exchanged = True
        """Whether ranks have told each other everything since the last global batch."""

    @property
    def split(self) -> Split:
        """How the next global batch is split over the ranks."""
        return self.source.split_at(self.position)

    @property
    def epoch(self) -> int:
        """The epoch; where groups share their parameters, counted by the samples of all groups together."""
        if self._outer is None:
            return self.position.epoch
        return (self._outer.samples + self._skipped_samples) // self.source.num_samples

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside a global batch."""
        return self.global_step.is_open

    @property
    def plan(self) -> Plan | None:
        """The plan that was agreed on last."""
        return self._plans.current

    @property
    def plan_changes(self) -> Sequence[tuple[int, Plan, str]]:
        """(step, plan, reason) for each change of the plan."""
        return self._plans.changes

    @property
    def measurements(self) -> Measurements | None:
        """The profiles that the first plan was made from."""
        return self._plans.measured

    @property
    def saved(self) -> tuple[CheckpointInfo, ...]:
        """The checkpoints in the folder that was last saved to; known to rank 0."""
        return self.checkpoints.saved

    # One step

    def end_global_batch(self) -> None:
        """Reduce, agree, step: everything global happens here, once, on all ranks."""
        micro = self.global_step.micro
        assert micro
        assert self.global_step.is_complete
        self.global_step.shadow_remaining_micro_steps()
        self.strategy.finish_reduction(micro.max_micro_steps)
        report = self._report_batch(micro)
        with self._world.timer.exposed():
            reports = self._exchange(report)
        self._idle.catch_up(reports, self.progress)
        self._update(reports, micro)
        result = self.global_step.agree(reports, self._world.settings.max_grad_norm)
        if result.should_step:
            self.global_step.scale_grads(result.grad_factor)
            self.optimizer.assign_grads(result.touched)
            self._stepper.step(micro)
            self.strategy.all_gather_params()
        if result.weight:
            self.global_step.scale.update(result.should_step)
        self.optimizer.clear_grads()
        self.strategy.clear()
        self.global_step.clear()
        self._merge_metrics(reports)
        self._advance(micro, result)
        if self._preemption and self._preemption.is_last_batch:
            self.close()
            raise Preempted

    def _report_batch(self, micro: MicroBatch) -> BatchReport:
        follows = self._world.settings.follows
        return self._report(
            before=micro.num_micro_steps > 0,
            weight=self.global_step.weight,
            grad_square=self.global_step.grad_square(self._world.settings.max_grad_norm),
            touched=self.strategy.touched(),
            pace=self._plans.report(self._world.timer.busy_s()) if follows else None,
            preemption=self._preemption.report() if self._preemption else None,
        )

    def _update(self, reports: Sequence[BatchReport], micro: MicroBatch) -> None:
        """Act on what ranks reported about preemption and speed."""
        if self._preemption:
            self._preemption.update([report.preemption for report in reports if report.preemption])
        if self._world.settings.follows:
            paces = [report.pace for report in reports if report.pace]
            # Where groups share their parameters, an epoch ends with the samples of all groups.
            steps_left = None if self._outer else self.source.steps_after(micro, self._num_epochs)
            self._plans.update(paces, self.source.split_of(micro), self.step, steps_left)

    def _advance(self, micro: MicroBatch, result: StepResult) -> None:
        self.position = DataPosition(micro.epoch, micro.batch + 1)
        batches = self.source.split_of(micro).batches
        memory = {**self.strategy.memory(), "optimizer": self.optimizer.state_bytes()}
        stats = self._world.timer.end_step(self.step, batches[self._world.rank], memory)
        self.stats = [*self.stats[1 - _MAX_STATS :], stats]
        self.step += 1
        self._has_ended_batch, self._has_exchanged = True, False
        if self._outer and not result.should_step:
            self._skipped_samples += micro.global_samples
        self._idle.begin_wait(batches, had_data=micro.num_micro_steps > 0)

    # What the user's loop does

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Add the gradients of a micro-batch."""
        self._world.precision.end()
        counts = self.global_step.backward(loss, weight)
        self._world.timer.end_micro_step()
        self._backward_calls += 1
        self.metrics.set_weight(counts)

    def log(self, values: dict[str, Any]) -> None:
        """Add metrics of a micro-batch."""
        if self.global_step.micro is None:
            raise UserError("run.log was called before the first micro-batch; call it in the loop over the loader")
        self.metrics.log(values)

    def on_optimizer_step(self) -> None:
        """End the global batch if it is complete: the loop has called `optimizer.step`."""
        self._has_called_step = True
        if not self.global_step.is_open:
            return
        if not self.global_step.has_run_backward:
            raise UserError("optimizer.step came before run.backward; call run.backward(loss) first")
        if self.global_step.is_complete:
            self.end_global_batch()

    def run_epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of epochs up to `count`, each once; one that was left early is over, too."""
        self._num_epochs, number = count, self.epoch
        while number < count:
            self._epoch_in_loop = number
            yield number
            self._end_last_loop()
            if not self._has_exchanged:
                self._exchange_between_batches()
            if self._outer is None and self.position.epoch == number:
                self.position = DataPosition(number + 1, 0)
            number = self.epoch if self._outer is None else max(number + 1, self.epoch)

    def save(self, folder: str, keep: int, *, wait: bool) -> None:
        """Begin a checkpoint."""
        self.checkpoints.save(folder, keep, self.progress(), wait=wait)

    def load(self, folder: str) -> bool:
        """Resume from a checkpoint, if there is one."""
        with self._world.timer.excluded():
            loaded = self.checkpoints.load(folder, self.progress())
        if loaded is None:
            return False
        self.step, self.position = loaded
        if self._outer:
            self.strategy.all_gather_params()
        if self._plans.current:
            self.source.restart(self._plans.current.split)
        self._idle.reset_hyperparams()
        return True

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
        return Progress(
            step=self.step,
            position=self.position,
            split=self.split,
            shares=self.shares,
            seed=self._world.settings.seed,
            idle=idle,
        )

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and release what the loop holds besides the model."""
        try:
            self.checkpoints.wait()
        finally:
            self._stepper.close()
            if self._outer:
                self._outer.close()
            self.strategy.close()
            self._world.close()

    # What the loader calls

    def begin_epoch(self) -> None:
        """Begin a loop over the loader."""
        self._end_last_loop()
        check_frozen(self.strategy.units)
        self.strategy.check_params_in_place()
        self._world.timer.restart()
        self._first_epoch = max(self.epoch, self._epoch_in_loop)

    def draw(self, micro_batches: Iterator[tuple[MicroBatch, Any]]) -> tuple[MicroBatch, Any] | None:
        """Draw the next micro-batch; the time it takes counts as waiting for data."""
        with self._world.timer.data_wait():
            return next(micro_batches, None)

    def finish_micro_step(self) -> None:
        """Finish what the user's loop left undone in the last micro-step."""
        self._world.precision.end()
        self.global_step.end_unfinished_micro_step()
        if self.global_step.micro:
            self.metrics.end_micro_step(float(self.global_step.micro.num_samples))
        if self.global_step.is_complete:
            self.end_global_batch()

    def continues(self) -> bool:
        """Return whether the loop continues after a global batch; a rank without data in it does as the others do."""
        if self._preemption:
            self._save_if_preempted(self._preemption)
        micro = self.global_step.micro
        if not self._idle.loop_continues(self.progress, had_data=micro is None or micro.num_micro_steps > 0):
            return False
        if self._outer and self._first_epoch < self.epoch:
            self._exchange_between_batches()
            return False
        return True

    def begin_micro_step(self, micro: MicroBatch) -> bool:
        """Begin a micro-step; return False if this rank has no data in its global batch, which then has ended."""
        self.global_step.begin_micro_step(micro)
        self.metrics.begin_micro_step(self.step)
        if micro.num_micro_steps:
            self._world.timer.begin_micro_step()
            self._world.precision.begin()
            return True
        self.end_global_batch()
        return False

    def leave(self) -> None:
        """Leave the loop over the loader, for whatever reason."""
        self._world.precision.end()
        self._tell_loop_left()

    def end_epoch(self, epoch: int) -> None:
        """End an epoch: the loader has come to its end."""
        self.position = DataPosition(epoch + 1, 0)
        report = self._report(before=True, backward_calls=self._backward_calls, has_called_step=self._has_called_step)
        reports = self._exchange(report)
        if self._has_ended_batch and not any(report.backward_calls for report in reports):
            raise UserError("run.backward was not called in this epoch; call run.backward(loss) for each micro-batch")
        if self._has_ended_batch and not any(report.has_called_step for report in reports):
            raise UserError(
                "optimizer.step was not called in this epoch, or on another optimizer than the one that run.prepare "
                "returned; call it on that one"
            )
        self._catch_up_between_batches(reports)

    def repeats_epoch(self) -> bool:
        """Return whether the loop goes through the samples again: until all groups together had enough."""
        return self._outer is not None and self._first_epoch >= self.epoch

    # What ranks tell each other

    def _exchange(self, report: BatchReport) -> list[BatchReport]:
        """Gather the reports of all ranks. A collective."""
        if self._world.world_size == 1:
            return [report]
        return [BatchReport.from_json(message) for message in self._world.exchange.all_gather(report.to_json())]

    def _exchange_between_batches(self) -> None:
        self._catch_up_between_batches(self._exchange(self._report(before=True)))

    def _catch_up_between_batches(self, reports: Sequence[BatchReport]) -> None:
        self._merge_metrics(reports)
        self._idle.catch_up(reports, self.progress)
        self._has_exchanged = True

    def _end_last_loop(self) -> None:
        """End the last loop over the loader; refuse to continue where it was left inside a global batch."""
        if self.in_batch:
            raise UserError("the loop over the loader was left inside a global batch; leave it when `not run.in_batch`")
        self._tell_loop_left()

    def _tell_loop_left(self) -> None:
        """Tell ranks without data that the loop was left; an iterator that is kept does not end by itself."""
        if not self.in_batch:
            self._idle.leave_loop(lambda: self._report(before=True, with_metrics=False))
        else:
            self._idle.forget_leader()

    def _report(self, *, before: bool, with_metrics: bool = True, **figures: Any) -> BatchReport:
        """Report what this rank did; `before`: whether it ran the loop's body before, or no rank did.

        With one rank nothing is looked at, so that a GPU need not be waited for.
        """
        with_metrics = with_metrics and self._world.world_size > 1
        return BatchReport(
            lr_scheduler_calls=[scheduler.calls for scheduler in self._lr_schedulers],
            has_bypassed_scheduler=any(scheduler.is_bypassed for scheduler in self._lr_schedulers),
            metrics=self.metrics.sums_before(self.step) if with_metrics else {},
            save_calls=self.checkpoints.save_calls,
            hyperparams=self._idle.changed_hyperparams(),
            was_in_body=self._idle.was_in_body(before=before),
            **figures,
        )

    def _merge_metrics(self, reports: Sequence[BatchReport]) -> None:
        if self._world.world_size == 1:
            self.metrics.merge_local(self.step)
        else:
            self.metrics.merge([report.metrics for report in reports])

    def _save_if_preempted(self, preemption: Preemption) -> None:
        micro = self.global_step.micro
        if self.in_batch or micro is None or not micro.num_micro_steps:
            return
        folder = str(preemption.folder)
        if not self.checkpoints.would_wait(folder, self.step):
            preemption.save_if_due(lambda: self.save(folder, DEFAULT_KEEP, wait=False))
