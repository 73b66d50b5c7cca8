"""How a rank without data keeps up with a loop whose body it does not run.

In a global batch in which a rank has no samples, its user's loop is not entered: it sees no `break`, no call of a
scheduler or of `run.save`, no learning rate that is set by hand. All of that reaches it here, from the other ranks.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mimatrix.comm.group import Group
from mimatrix.core.errors import PeerLost, UserError
from mimatrix.engine.checkpoint.manager import CheckpointManager
from mimatrix.engine.checkpoint.state import Progress
from mimatrix.engine.loop.batch_report import BatchReport
from mimatrix.engine.loop.global_step import GlobalStep
from mimatrix.engine.rank_exchange import RankExchange

_PAUSE_S = 1e-4
_LONGEST_PAUSE_S = 5e-3
Hyperparams = dict[str, Any]
"""By `group/name`."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """Whether the loop continues after a global batch, as one rank that runs its body tells those that do not."""

    continues: bool
    collective_call: str = ""
    """The call that needs all ranks and cannot be made now, if that is why the loop stops."""
    report: BatchReport | None = None
    """What was done in the loop's body before it was left."""

    def to_text(self) -> str:
        """Return JSON for the store."""
        report = None if self.report is None else self.report.to_json()
        return json.dumps([self.continues, self.collective_call, report])

    @classmethod
    def from_text(cls, text: str | bytes) -> "LoopState":
        """Read what `to_text` gave."""
        continues, call, report = json.loads(text)
        return cls(continues, call, None if report is None else BatchReport.from_json(report))


class LoopSignal:
    """Tells ranks without data through the store how the loop continues, one signal per global batch.

    The rank that posts waits for no other.
    """

    def __init__(self, group: Group, run_id: str, timeout_s: float = 300.0) -> None:
        self._group, self.run_id, self._timeout_s = group, run_id, timeout_s
        self._store: Any = group.endpoint.store

    def post(self, batch: int, state: LoopState) -> None:
        """Say how the loop continues after global batch number `batch`."""
        with suppress(NotImplementedError, RuntimeError):  # the one before is read by now; not all stores can delete
            self._store.delete_key(self._key(batch - 2))
        self._group.endpoint.control.begun[self.run_id] = batch
        self._store.set(self._key(batch), state.to_text())

    def wait(self, batch: int, leader: int) -> LoopState:
        """Wait for what the leading rank posts."""
        key, started, pause = self._key(batch), time.monotonic(), _PAUSE_S
        endpoint, members = self._group.endpoint, self._group.members
        doing = "the loop over its loader"
        endpoint.control.await_arrival(self.run_id, batch, (members[leader],), None)
        while not self._store.check([key]):
            endpoint.control.note_waiting(self.run_id)
            endpoint.control.check(members[leader], members, doing)
            if time.monotonic() - started > self._timeout_s:
                name = endpoint.control.describe(members[leader])
                raise PeerLost(f"{name} did not continue {doing} for {self._timeout_s:.0f} s", members[leader])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        endpoint.control.end_arrival(self.run_id)
        # The leader also leaves its loop by an error that all ranks know of.
        endpoint.control.check(-1, members, doing)
        return LoopState.from_text(self._store.get(key))

    def _key(self, batch: int) -> str:
        return f"mimatrix/run/{self.run_id}/{batch}"


class HyperparamSync:
    """The settings of an optimizer's param groups, such as learning rates, kept the same on all ranks.

    A loop may set them by hand, before a step and after it. A rank without data takes over what was set after the last
    step by ranks that had data in it, and before this step by ranks that have data now.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._count = len(self._groups)
        self._agreed = self.current()

    def current(self) -> Hyperparams:
        """Return every setting that is a number or similar."""
        return {
            f"{number}/{name}": _to_json(value)
            for number, group in enumerate(self._groups)
            for name, value in group.items()
            if name != "params" and _is_plain(value)
        }

    def reset(self) -> None:
        """Take the current values as agreed: a checkpoint was loaded, on all ranks."""
        self._agreed = self.current()

    def changed(self) -> Hyperparams:
        """Return what has changed on this rank since all agreed."""
        if len(self._groups) != self._count:
            raise UserError("a param group was added after run.prepare; give the optimizer all of them before")
        return {name: value for name, value in self.current().items() if self._agreed.get(name) != value}

    def agree(self, reports: Sequence[BatchReport], *, rank: int) -> None:
        """Take over what changed on other ranks since all agreed.

        Ranks that ran the loop's body both after the last step and before this one must agree, and the others follow
        them. If there are none, what was set before this step overrides what was set after the last.
        """
        changes = [report.hyperparams for report in reports]
        after = [rank for rank, report in enumerate(reports) if report.was_in_body[0]]
        before = [rank for rank, report in enumerate(reports) if report.was_in_body[1]]
        both = [busy for busy in after if busy in before]
        for ranks in [both] if both else [after, before]:
            for other in ranks[1:]:
                _check_equal(changes[ranks[0]], changes[other], self._agreed, ranks[0], other)
        for source in both[:1] or [*after[:1], *before[:1]]:
            self._agreed |= changes[source]
        if rank not in both:
            current = self.current()
            self._set({name: value for name, value in self._agreed.items() if current.get(name) != value})

    def _set(self, values: Hyperparams) -> None:
        for name, value in values.items():
            number, _, key = name.partition("/")
            group = self._groups[int(number)]
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _check_equal(
    one: Mapping[str, Any], other: Mapping[str, Any], agreed: Hyperparams, first: int, second: int
) -> None:
    for name in {**one, **other}:
        value, other_value = one.get(name, agreed.get(name)), other.get(name, agreed.get(name))
        if value != other_value:
            number, _, key = name.partition("/")
            raise UserError(
                f"the optimizer's {key} (param group {number}) is {value} on rank {first} and {other_value} on rank "
                f"{second}; set it from what is the same on all ranks, such as run.step or the result of run.evaluate"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, tuple | list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value


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
