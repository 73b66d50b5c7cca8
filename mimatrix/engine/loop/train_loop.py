"""The course of a prepared run: one global batch after another, and what ranks tell each other where one ends.

The loader says when a micro-step begins and the loop asks for more; the user's `run.backward` and optimizer say the
rest. Ranks without data in a batch do not run the loop's body: they hear here what the others did in it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import DEFAULT_KEEP, CheckpointManager
from mimatrix.engine.checkpoint.state import Progress, TrainState
from mimatrix.engine.data.source import DataPosition, MicroBatch, MicroBatchSource
from mimatrix.engine.loop.global_step import GlobalStep
from mimatrix.engine.loop.hyperparams import HyperparamSync
from mimatrix.engine.loop.loop_signal import LoopSignal
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.loop.preemption import EXIT_PREEMPTED, Preemption
from mimatrix.engine.outer_optimizer import OuterOptimizer
from mimatrix.engine.planning.plan_follower import PlanFollower
from mimatrix.engine.prepare import publish
from mimatrix.engine.rank_exchange import Message
from mimatrix.engine.step_timer import StepStats
from mimatrix.engine.world import World
from mimatrix.engine.zero.sharding import Zero0
from mimatrix.engine.zero.units import check_frozen
from mimatrix.planner.split import Split

_SEEN = 1000
"""Steps whose figures stay."""


class TrainLoop:
    """Where one rank stands in it. `plans`, `knobs` and `word` are what it has agreed on with the others."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        cycle: GlobalStep,
        feed: MicroBatchSource,
        plans: PlanFollower,
        shares: Shares,
        *,
        agreed: tuple[HyperparamSync, LoopSignal] | None = None,
        outer: OuterOptimizer | None = None,
        leaving: Preemption | None = None,
    ) -> None:
        self._world, self.cycle, self.feed, self.plans, self._shares = world, cycle, feed, plans, shares
        self._knobs: HyperparamSync | None = None
        self._word: LoopSignal | None = None
        if agreed:
            self._knobs, self._word = agreed
        self._outer, self._leaving = outer, leaving
        self.step = 0
        """Global batches done."""
        self.position = DataPosition(0, 0)
        """The next global batch."""
        self.epochs: int | None = None
        """How many there will be, if the loop has said so."""
        self.schedulers: list[SyncedLRScheduler] = []
        self.logs = MetricLog(prints=world.rank == 0 and not world.settings.quiet)
        self.stats: list[StepStats] = []
        subject = TrainState(
            model=model,
            sharding=cycle.sharding,
            binding=cycle.binding,
            scale=cycle.scale,
            schedulers=self.schedulers,
            rank=world.rank,
            ranks=world.ranks,
            device=world.device,
            outer=outer,
        )
        # Made here and not at the first save: ranks without data do not come by there.
        self.checkpoints = CheckpointManager(
            world.further("checkpoint") if world.main else None, subject, self._standing
        )
        self._logging = 0
        self._counted: float | None = None
        self._unweighed: list[dict[str, Any]] = []
        self._asked = False
        """Whether the loop has called the optimizer."""
        self._ended = self._backs = 0
        self._number = self._began = 0
        """The epoch that the loop is in, as far as it has said so; the one in which the loop over the loader began."""
        self._skipped = 0
        """Samples of steps that were left out, of which other groups know nothing."""
        self._has_met = True
        """Whether ranks have told each other all since the last global batch."""
        self._is_behind = False
        """Whether others were in the loop's body after the last global batch, where this rank had no data."""
        self._leader: int | None = None
        """Who says how it goes on after the last global batch, where a rank had no data in it."""
        cycle.tell, cycle.hear = self._tell_batch, self._hear_batch

    @property
    def split(self) -> Split:
        """How the next global batch is cut over the ranks."""
        return self.feed.split_at(self.position)

    @property
    def epoch(self) -> int:
        """Where groups share their parameters, an epoch is as many samples as there are, whoever had them."""
        if self._outer is None:
            return self.position.epoch
        return (self._outer.samples + self._skipped) // self.feed.num_samples

    # What the user's loop does

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """The gradients of a micro-batch."""
        self._world.precision.end()
        self._counted = self.cycle.backward(loss, weight)
        self._world.watch.end_micro()
        self._backs += 1
        self._weigh(self._counted)

    def log(self, values: dict[str, Any]) -> None:
        """Figures of a micro-batch."""
        if self.cycle.micro is None:
            raise UserError("run.log was called before the first micro-batch; call it in the loop over the loader")
        if self._counted is None:
            self._unweighed.append(values)  # its weight is known with `backward`
        else:
            self.logs.add(self._logging, self._counted, values)

    def asked_to_step(self) -> None:
        """The loop has called the optimizer, which acts if the global batch is complete."""
        self._asked = True
        if not self.cycle.is_open:
            return
        if not self.cycle.went_back:
            raise UserError("optimizer.step came before run.backward; call run.backward(loss) first")
        if self.cycle.may_end:
            self.end_batch()

    def run_epochs(self, count: int) -> Iterator[int]:
        """The numbers of epochs up to `count`, each once; one that was left early is over, too."""
        self.epochs, number = count, self.epoch
        while number < count:
            self._number = number
            yield number
            self.check_left()
            self._leave_word()
            if not self._has_met:
                self._meet()
            if self._outer is None and self.position.epoch == number:
                self.position = DataPosition(number + 1, 0)
            number = self.epoch if self._outer is None else max(number + 1, self.epoch)

    def load(self, folder: str) -> bool:
        """Go on from a checkpoint, if there is one."""
        with self._world.watch.aside():
            found = self.checkpoints.load(folder)
        if found is None:
            return False
        self.step, self.position = found
        if self._outer:
            publish(self.cycle.sharding)
        if self.plans.current:
            self.feed.restart(self.plans.current.split)
        if self._knobs:
            self._knobs.renew()
        return True

    def check_closed(self, what: str, when: str = "when `not run.in_batch`") -> None:
        """Refuse what cannot be done inside of a global batch."""
        if self.cycle.is_open:
            raise UserError(f"{what} was called inside of a global batch; call it {when}")

    def check_left(self) -> None:
        """Refuse to go on where the loop over the loader ended inside of a global batch."""
        if self.cycle.is_open:
            raise UserError(
                "the loop over the loader was left inside of a global batch; leave it when `not run.in_batch`"
            )

    def check_all_come(self, what: str) -> None:
        """Refuse what needs all ranks, in a loop whose body a rank without data does not run."""
        leader, self._leader = self._leader, None
        if leader is None or self._word is None:
            return
        if leader == self._world.rank:
            self._word.leave(self._ended, {"goes": False, "asks": what})
        raise _not_all_come(what, self._standing().idle[0])

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and give back what the course holds beside the model."""
        try:
            self.checkpoints.wait()
        finally:
            if self._outer:
                self._outer.close()
            if isinstance(self.cycle.sharding, Zero0):
                self.cycle.sharding.close()
            self._world.close()

    # What the loader calls

    def begin_epoch(self) -> None:
        """A loop over the loader begins."""
        self.check_left()
        self._leave_word()
        check_frozen(self.cycle.sharding.units)
        self.cycle.sharding.check_places()
        self._world.watch.restart()
        self._began = max(self.epoch, self._number)

    def drawn(self, parts: Iterator[tuple[MicroBatch, Any]]) -> tuple[MicroBatch, Any] | None:
        """The next part, the time for which counts as waiting for the loader."""
        with self._world.watch.data():
            return next(parts, None)

    def settle(self) -> None:
        """Finish what the user's loop left undone in the last micro-step."""
        self._world.precision.end()
        self.cycle.leave()
        if self.cycle.micro and self._unweighed:
            self._weigh(float(self.cycle.micro.num_samples))
        if self.cycle.may_end:
            self.end_batch()

    def goes_on(self) -> bool:
        """Whether the loop goes on after a global batch; a rank without data in it does as the others do."""
        if self._leaving:
            self._leave_when_due(self._leaving)
        if not self._others_go_on():
            return False
        if self._outer and self._began < self.epoch:
            self._meet()
            return False
        return True

    def enter(self, micro: MicroBatch) -> bool:
        """The next micro-step; False if this rank has no data in its global batch, which then is done."""
        self.cycle.enter(micro)
        self._logging, self._counted = self.step, None
        if micro.num_micro_steps:
            self._world.watch.begin_micro()
            self._world.precision.begin()
            return True
        self.end_batch()
        return False

    def end_batch(self) -> None:
        """The global batch ends on this rank, and with it on all."""
        micro = self.cycle.micro
        assert micro
        outcome = self.cycle.end()
        self._join_logs(outcome.messages)
        self.position = DataPosition(micro.epoch, micro.batch + 1)
        batches = self._split_of(micro).batches
        self.stats = [*self.stats[1 - _SEEN :], self._world.watch.step(self.step, batches[self._world.rank])]
        self.step += 1
        self._ended += 1
        self._is_behind = not micro.num_micro_steps
        self._has_met = False
        if self._outer and not outcome.stepped:
            self._skipped += micro.global_samples
        busy = [rank for rank, samples in enumerate(batches) if samples]
        self._leader = busy[0] if len(busy) < self._world.ranks else None
        if self._leaving and self._leaving.ends:
            self.close()
            raise SystemExit(EXIT_PREEMPTED)

    def leave_loop(self) -> None:
        """The loop over the loader has ended, however it did."""
        self._world.precision.end()
        self._leave_word()

    def end_epoch(self, epoch: int) -> None:
        """The loader has come to its end."""
        self.position = DataPosition(epoch + 1, 0)
        messages = self._world.exchange.all({**self._tell(before=True), "backs": self._backs, "asked": self._asked})
        if self._ended and not any(message["backs"] for message in messages):
            raise UserError("run.backward was not called in this epoch; call run.backward(loss) for each micro-batch")
        if self._ended and not any(message["asked"] for message in messages):
            raise UserError(
                "optimizer.step was not called in this epoch, or on an optimizer that was made after run.prepare; call "
                "it on the one that was prepared"
            )
        self._join_logs(messages)
        self._hear(messages)
        self._has_met = True

    def begins_again(self) -> bool:
        """Whether the loop goes through the samples once more: until all groups together have had so many."""
        return self._outer is not None and self._began >= self.epoch

    # What ranks tell each other

    def _meet(self) -> None:
        """Between two global batches, all ranks: whatever they have not told yet."""
        messages = self._world.exchange.all(self._tell(before=True))
        self._join_logs(messages)
        self._hear(messages)
        self._has_met = True

    def _others_go_on(self) -> bool:
        """Whether those that run the loop's body do: a rank without data finds the word that one of them leaves."""
        leader, self._leader = self._leader, None
        if leader is None or self._word is None:
            return True
        if self._world.rank == leader:
            self._word.leave(self._ended, {"goes": True})
        micro = self.cycle.micro
        if micro is None or micro.num_micro_steps:
            return True
        found = self._word.find(self._ended, leader)
        if "asks" in found:
            raise _not_all_come(str(found["asks"]), self._world.rank)
        if not found["goes"]:
            self._catch_up([found])
        return bool(found["goes"])

    def _leave_word(self) -> None:
        """That the loop was left, for ranks without data, unless that was said: a loader that is kept does not end."""
        leader, self._leader = self._leader, None
        if self._word and leader == self._world.rank and not self.cycle.is_open:
            self._word.leave(self._ended, {**self._tell(before=True), "logs": {}, "goes": False})

    def _tell(self, *, before: bool) -> Message:
        """What this rank has to say where it meets the others. Alone nothing is looked at: a GPU need not wait.

        `before`: whether it was in the loop's body before it came here, or nobody was.
        """
        return {
            "calls": [each.calls for each in self.schedulers],
            "logs": self.logs.message(self.step) if self._world.ranks > 1 else {},
            "saves": self.checkpoints.last_save,
            "knobs": self._knobs.changed() if self._knobs else {},
            "ran": [not self._is_behind, before],
        }

    def _tell_batch(self) -> Message:
        micro = self.cycle.micro
        assert micro
        pace = self.plans.report(self._world.watch.busy_s()) if self._world.settings.follows else {}
        leaving = {"leaving": self._leaving.tell()} if self._leaving else {}
        return {**self._tell(before=micro.num_micro_steps > 0), "pace": pace, **leaving}

    def _hear_batch(self, messages: Sequence[Message]) -> None:
        self._hear(messages)
        if self._leaving:
            self._leaving.hear([message["leaving"] for message in messages])
        micro = self.cycle.micro
        if self._world.settings.follows and micro:
            paces = [message["pace"] for message in messages]
            self.plans.update(paces, self._split_of(micro), self.step, self._steps_left(micro))

    def _hear(self, messages: Sequence[Message]) -> None:
        self._catch_up(messages)
        if self._knobs:
            after, before = zip(*(message["ran"] for message in messages), strict=True)
            self._knobs.agree([message["knobs"] for message in messages], after, before, rank=self._world.rank)
        self._is_behind = False

    def _catch_up(self, messages: Sequence[Message]) -> None:
        """Before a step, ranks without data do what the others' loops did since the last one."""
        for number, scheduler in enumerate(self.schedulers):
            scheduler.catch_up([message["calls"][number] for message in messages])
        self.checkpoints.catch_up([message["saves"] for message in messages])

    def _join_logs(self, messages: Sequence[Message]) -> None:
        if self._world.ranks == 1:
            self.logs.join_alone(self.step)
        else:
            self.logs.join([message["logs"] for message in messages])

    def _weigh(self, weight: float) -> None:
        for values in self._unweighed:
            self.logs.add(self._logging, weight, values)
        self._unweighed.clear()

    def _leave_when_due(self, leaving: Preemption) -> None:
        last = self.cycle.micro
        if self.cycle.is_open or last is None or not last.num_micro_steps:
            return
        folder = str(leaving.folder)
        if not self.checkpoints.would_wait(folder):
            leaving.between_batches(lambda: self.checkpoints.save(folder, DEFAULT_KEEP, wait=False))

    def _steps_left(self, micro: MicroBatch) -> int | None:
        """After the one of this micro-step, if one can know."""
        if self.epochs is None or self._outer or self.feed.is_stream:
            return None
        return (self.epochs - micro.epoch) * len(self.feed) - micro.batch - 1

    def _split_of(self, micro: MicroBatch) -> Split:
        """How the global batch of a micro-step is cut."""
        return self.feed.split_at(DataPosition(micro.epoch, micro.batch)).for_samples(micro.global_samples)

    def _standing(self) -> Progress:
        micro = self.cycle.micro
        cut = self._split_of(micro) if micro else self.split
        idle = tuple(rank for rank, sizes in enumerate(cut.micro) if not sizes)
        return Progress(
            step=self.step,
            position=self.position,
            split=self.split,
            shares=self._shares,
            seed=self._world.settings.seed,
            idle=idle,
        )


def _not_all_come(what: str, idle: int) -> UserError:
    return UserError(
        f"rank {idle} has no data in this batch and does not come to {what}; call it after the loop over the loader, "
        "or give every rank data"
    )
