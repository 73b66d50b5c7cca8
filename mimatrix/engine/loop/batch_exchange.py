"""How ranks exchange their reports, at the end of a global batch and between batches."""

from collections.abc import Sequence
from typing import Any

from mimatrix.engine.checkpoint.manager import CheckpointManager
from mimatrix.engine.data.position import MicroBatch
from mimatrix.engine.loop.automatic_saves import AutomaticSaves
from mimatrix.engine.loop.batch_report import BatchReport, LaunchOrders
from mimatrix.engine.loop.global_step import GlobalStep
from mimatrix.engine.loop.idle_ranks import IdleRanks
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.planning.plan_follower import PlanFollower
from mimatrix.engine.world import World
from mimatrix.engine.zero.strategy import ShardingStrategy


class BatchExchange:
    """Builds this rank's reports from what its loop has done, gathers those of all ranks, and acts on them."""

    def __init__(
        self,
        world: World,
        *,
        strategy: ShardingStrategy,
        global_step: GlobalStep,
        plans: PlanFollower,
        saves: AutomaticSaves,
        metrics: MetricLog,
        checkpoints: CheckpointManager,
        idle_ranks: IdleRanks,
        lr_schedulers: Sequence[SyncedLRScheduler],
    ) -> None:
        self._world, self._strategy, self._global_step = world, strategy, global_step
        self._plans, self._saves, self._metrics, self._checkpoints = plans, saves, metrics, checkpoints
        self._idle, self._lr_schedulers = idle_ranks, lr_schedulers
        self._launch_orders = LaunchOrders()

    def report_batch(self, step: int, micro: MicroBatch) -> BatchReport:
        """Report the global batch that this rank has computed, with its last micro-batch, after `step` others."""
        return self.build(
            step,
            before=micro.num_micro_steps > 0,
            weight=self._global_step.weight,
            grad_square=self._global_step.grad_square(self._world.settings.max_grad_norm),
            touched=self._strategy.touched(),
            busy_s=self._world.timer.busy_s_if_known(),
            launch_order=self._launch_orders.news(self._strategy.launch_order()),
            pace=self._plans.report(self._world.timer.busy_s()) if self._plans.needs_pace else None,
            **self._saves.report(step),
        )

    def take_over(self, reports: Sequence[BatchReport]) -> None:
        """Act on what ranks reported about speed, the order of their launches and saves that are due."""
        self._world.timer.note_busy([report.busy_s for report in reports], self._world.rank)
        if order := self._launch_orders.agree([report.launch_order for report in reports]):
            self._strategy.adopt_launch_order(order)
        self._saves.update(reports)

    def build(self, step: int, *, before: bool, with_metrics: bool = True, **figures: Any) -> BatchReport:
        """Report what this rank did up to `step`; `before`: whether it ran the loop's body before, or no rank did.

        With one rank nothing is looked at, so that a GPU need not be waited for.
        """
        with_metrics = with_metrics and self._world.world_size > 1
        return BatchReport(
            lr_scheduler_calls=[scheduler.calls for scheduler in self._lr_schedulers],
            has_bypassed_scheduler=any(scheduler.is_bypassed for scheduler in self._lr_schedulers),
            metrics=self._metrics.sums_before(step) if with_metrics else {},
            save_calls=self._checkpoints.save_calls,
            hyperparams=self._idle.changed_hyperparams(),
            was_in_body=self._idle.was_in_body(before=before),
            **figures,
        )

    def gather(self, report: BatchReport) -> list[BatchReport]:
        """Gather the reports of all ranks. A collective."""
        if self._world.world_size == 1:
            return [report]
        return [BatchReport.from_json(message) for message in self._world.exchange.all_gather(report.to_json())]

    def merge_metrics(self, step: int, reports: Sequence[BatchReport]) -> None:
        """Merge what all ranks have logged in the steps before `step`."""
        if self._world.world_size == 1:
            self._metrics.merge_local(step)
        else:
            self._metrics.merge([report.metrics for report in reports])
