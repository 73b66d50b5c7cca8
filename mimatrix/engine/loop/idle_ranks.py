"""How a rank without data keeps up with a loop whose body it does not run.

In a global batch in which a rank has no samples, its user's loop is not entered: it sees no `break`, no call of a
scheduler or of `run.save`, no learning rate that is set by hand. All of that reaches it here, from the other ranks.
"""

from collections.abc import Callable, Sequence

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import CheckpointManager
from mimatrix.engine.checkpoint.state import Progress
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.hyperparam_sync import Hyperparams, HyperparamSync
from mimatrix.engine.loop.loop_signal import LoopSignal, LoopState
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler


class IdleRanks:
    """Keeps ranks without data in step with the others' loops; without peers there is nothing to do."""

    def __init__(
        self,
        rank: int,
        lr_schedulers: Sequence[SyncedLRScheduler],
        checkpoints: CheckpointManager,
        peers: tuple[HyperparamSync, LoopSignal] | None,
    ) -> None:
        self._rank, self._lr_schedulers, self._checkpoints = rank, lr_schedulers, checkpoints
        self._peers = peers
        self._batches = 0
        """Global batches ended in this process."""
        self._leader: int | None = None
        """Who says how the loop continues after the last global batch; None where all ranks had data, or know."""
        self._is_behind = False
        """Whether others ran the loop's body after the last global batch, where this rank had no data."""

    def begin_wait(self, batches: Sequence[int], *, had_data: bool) -> None:
        """Note who had data in the global batch that has just ended: `batches` are the samples of each rank."""
        busy = [rank for rank, samples in enumerate(batches) if samples]
        self._batches += 1
        self._is_behind = not had_data
        self._leader = busy[0] if self._peers and len(busy) < len(batches) else None

    def was_in_body(self, *, before: bool) -> tuple[bool, bool]:
        """Return whether this rank ran the loop's body after the last step, and `before` this meeting."""
        return (not self._is_behind, before)

    def changed_hyperparams(self) -> Hyperparams:
        """Return the optimizer's settings that the loop has changed on this rank."""
        return self._peers[0].changed() if self._peers else {}

    def reset_hyperparams(self) -> None:
        """Accept the optimizer's settings as they are: a checkpoint was loaded, on all ranks."""
        if self._peers:
            self._peers[0].reset()

    def loop_continues(self, progress: Callable[[], Progress], *, had_data: bool) -> bool:
        """Return whether the loop continues; a rank that had no data waits for the leader to say so."""
        leader, self._leader = self._leader, None
        if leader is None or self._peers is None:
            return True
        signal = self._peers[1]
        if self._rank == leader:
            signal.post(self._batches, LoopState(continues=True))
        if had_data:
            return True
        state = signal.wait(self._batches, leader)
        if state.collective_call:
            raise _missing_rank(state.collective_call, self._rank)
        if state.report:
            # What is wrong with a scheduler is raised where all ranks meet next, on all of them.
            repeatable = [scheduler for scheduler in self._lr_schedulers if not scheduler.needs_metric]
            self._repeat_calls([state.report], progress, repeatable)
        return state.continues

    def leave_loop(self, report: Callable[[], BatchReport]) -> None:
        """Tell ranks without data that the loop was left, unless they know."""
        leader, self._leader = self._leader, None
        if self._peers and leader == self._rank:
            self._peers[1].post(self._batches, LoopState(continues=False, report=report()))

    def forget_leader(self) -> None:
        """Expect no signal for the last global batch: the loop was left inside the next one."""
        self._leader = None

    def require_all(self, call: str, idle: Sequence[int]) -> None:
        """Refuse a call that needs all ranks where one of them is not in the loop's body."""
        leader, self._leader = self._leader, None
        if leader is None or self._peers is None:
            return
        if leader == self._rank:
            self._peers[1].post(self._batches, LoopState(continues=False, collective_call=call))
        raise _missing_rank(call, idle[0])

    def catch_up(self, reports: Sequence[BatchReport], progress: Callable[[], Progress]) -> None:
        """Do before a step what the others' loops did since the last one; the optimizer's settings included."""
        if any(report.has_bypassed_scheduler for report in reports):
            raise UserError(
                "the scheduler that was given to run.prepare was stepped or loaded directly; use the one that "
                "run.prepare returned"
            )
        self._repeat_calls(reports, progress, self._lr_schedulers)
        if self._peers:
            self._peers[0].agree(reports, rank=self._rank)
        self._is_behind = False

    def _repeat_calls(
        self,
        reports: Sequence[BatchReport],
        progress: Callable[[], Progress],
        lr_schedulers: Sequence[SyncedLRScheduler],
    ) -> None:
        for scheduler in lr_schedulers:
            number = self._lr_schedulers.index(scheduler)
            scheduler.catch_up([report.lr_scheduler_calls[number] for report in reports])
        self._checkpoints.catch_up([report.save_calls for report in reports], progress)


def _missing_rank(call: str, idle: int) -> UserError:
    return UserError(
        f"rank {idle} has no data in this batch and does not come to {call}; call it after the loop over the loader, "
        "or give every rank data"
    )
