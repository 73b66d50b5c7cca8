"""How ranks exchange their reports, at the end of a global batch and between batches."""

from collections.abc import Sequence
from typing import Any

from mimatrix.engine.checkpoint.manager import CheckpointManager
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.idle_ranks import IdleRanks
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.world import World


class BatchExchange:
    """Builds this rank's reports from what its loop has done, and gathers those of all ranks."""

    def __init__(
        self,
        world: World,
        *,
        metrics: MetricLog,
        checkpoints: CheckpointManager,
        idle_ranks: IdleRanks,
        lr_schedulers: Sequence[SyncedLRScheduler],
    ) -> None:
        self._world, self._metrics, self._checkpoints = world, metrics, checkpoints
        self._idle, self._lr_schedulers = idle_ranks, lr_schedulers

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
