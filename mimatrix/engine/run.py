"""A run: what the user's loop talks to. The loop stays the user's; everything global happens at the end of a batch."""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.comm.control import Waiting
from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine import batchnorm, evaluating, sameness
from mimatrix.engine.alone import Alone
from mimatrix.engine.binding import Binding, check_elementwise, check_steps
from mimatrix.engine.checkpoint import Checkpoints
from mimatrix.engine.cycle import Cycle
from mimatrix.engine.disk import Saved
from mimatrix.engine.exchange import Exchange, Message
from mimatrix.engine.feed import Feed, Micro, Position, check_loading
from mimatrix.engine.hooks import hear_gradients, hear_modules
from mimatrix.engine.knobs import Knobs
from mimatrix.engine.leaving import LEFT, Leaving
from mimatrix.engine.loader import Loader
from mimatrix.engine.logs import Logs
from mimatrix.engine.outer import Outer, Pushing
from mimatrix.engine.passing import STAGES, ParametersCut
from mimatrix.engine.plans import Plans
from mimatrix.engine.precision import LossScale, Precision
from mimatrix.engine.reading import GradientsRead, reads_in_place
from mimatrix.engine.schedulers import Scheduler
from mimatrix.engine.settings import Settings
from mimatrix.engine.sharding import Sharding
from mimatrix.engine.snapshot import Standing, Subject, persistent_buffers
from mimatrix.engine.stats import StepStats, Watch
from mimatrix.engine.surveying import Ground
from mimatrix.engine.units import Unit, check_frozen, is_compiled, units_of
from mimatrix.engine.word import Word
from mimatrix.planner.plan import Plan
from mimatrix.planner.profile import Measurements
from mimatrix.planner.split import Split, resolve_batches

Loss = Callable[[nn.Module, Any], torch.Tensor]
Whole = tuple[type[nn.Module], ...]


class Run:
    """One rank of a training run. `mimatrix.init` makes it; `group` gives further groups of the same ranks by name."""

    def __init__(
        self,
        settings: Settings,
        group: Callable[[str], Group] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        outer: Outer | None = None,
    ) -> None:
        self._outer = outer
        self.settings, self.rank, self.ranks, self.device = settings, rank, ranks, torch.device(device)
        self._group = group if ranks > 1 else None
        self._main = self._group("reduce") if self._group else None
        self._further: list[Group] = []
        self._exchange = Exchange(self._main)
        self._watch = Watch((self._main,) if self._main else (), device=self.device)
        self.devices = self._agree()
        batches = resolve_batches(settings.batch, settings.global_batch, self.devices)
        self._first = Split.of(batches, settings.micro_batch)
        self._precision = Precision(self._precisions()[rank], self.device)
        self.stage = settings.stage_for()
        self.shares = settings.shares_for(ranks)
        self.step = 0
        """Global batches done."""
        self.position = Position(0, 0)
        """The next global batch."""
        self._logs = Logs(prints=rank == 0 and not settings.quiet)
        self._cycle: Cycle | None = None
        self._checkpoints: Checkpoints | None = None
        self._model: nn.Module | None = None
        self._loader: Loader | None = None
        self._schedulers: list[Scheduler] = []
        self._stats: list[StepStats] = []
        self._logging = 0
        self._counted: float | None = None
        self._unweighed: list[dict[str, Any]] = []
        self._knobs: Knobs | None = None
        self._plans: Plans | None = None
        self._asked = False
        """Whether the loop has called the optimizer."""
        self._word: Word | None = None
        self._ended = self._backs = 0
        self._began = 0
        """The epoch in which the loop over the loader began."""
        self._leader: int | None = None
        """Who says how it goes on after the last global batch, where a rank had no data in it."""
        self._leaving: Leaving | None = None
        self._phase = "starting"

    # What the user's loop calls

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        /,
        *,
        loss: Loss | None = None,
        whole: Whole = (),
        **loading: Any,
    ) -> tuple[nn.Module, Optimizer, Loader]: ...

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        /,
        scheduler: LRScheduler,
        *,
        loss: Loss | None = None,
        whole: Whole = (),
        **loading: Any,
    ) -> tuple[nn.Module, Optimizer, Loader, LRScheduler]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        /,
        scheduler: LRScheduler | None = None,
        *,
        loss: Loss | None = None,
        whole: Whole = (),
        **loading: Any,
    ) -> Any:
        """Split a model and its optimizer over the ranks and its data into micro-batches. All ranks call it.

        The same objects come back, and a loader. `loss` is needed where a rank without data must run the model all
        the same (synchronised batch norm). `whole`: classes of modules that use their children's parameters without
        running the children, which matters in stage 3. `loading`: `shuffle`, `drop_last`, `collate`, `workers`,
        `prefetch`, `pin`.
        """
        if self._cycle:
            raise UserError("run.prepare was called twice; make another run with mimatrix.init for another model")
        check_prepared(model, optimizer, loading)
        feed = Feed(dataset, self._first, self.rank, seed=self.settings.seed, device=self.device, **loading)
        model.to(self.device)
        self._plan(model, optimizer, loss, feed, whole)
        self._check_compiled(model)
        ghost = self._synchronised(model, loss, feed)
        units = units_of(model, self.settings.unit_bytes_for(self.stage, self.devices), whole)
        self._check_same(dataset, units, optimizer)
        sharding = self._sharding(units, optimizer)
        if not isinstance(sharding, Alone):
            self._same_buffers(model)
        known = [piece.parameter for unit in units for piece in unit.pieces]
        binding = Binding(optimizer, sharding.slices(), known)
        scale = LossScale.start(any(name == "fp16" for name in self._precisions()))
        clip = self.settings.clip_norm
        cycle = Cycle(sharding, binding, self._exchange, self._watch, clip_norm=clip, scale=scale, ghost=ghost)
        self._precision.lower(model)
        if isinstance(sharding, Sharding):
            hear_gradients(units, cycle.arrived)
        if isinstance(sharding, ParametersCut):
            hear_modules(model, sharding)
        if self._outer:
            outer = self._outer
            outer.begin(model, binding, self._main, cut=sharding.parts)
            _publish(sharding)
            cycle.step_by(lambda micro, own: outer.step(micro.total, self._first.total, own))
        cycle.tell = self._tell_batch
        cycle.hear = self._hear_batch
        self._cycle, self._model, self._loader = cycle, model, Loader(self, feed)
        # Made here and not at the first save: ranks without data do not come by there.
        group = self._further_group("checkpoint") if self._group else None
        subject = Subject(
            model, sharding, binding, scale, self._schedulers, self.rank, self.ranks, self.device, self._outer
        )
        self._checkpoints = Checkpoints(group, subject, self._standing)
        self._watch.memory = partial(_memory, sharding, binding)
        self._patch(optimizer, model)
        if scheduler is not None:
            self._schedulers.append(Scheduler(scheduler, cycle))
        if self._leaving:
            self.load(self._leaving.folder)
        self._phase = "training"
        found = (model, optimizer, self._loader)
        return found if scheduler is None else (*found, scheduler)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Gradients of this micro-batch's mean loss. It counts by its samples, or by `weight` (of tokens, say)."""
        self._precision.end()
        self._counted = self._ready().backward(loss, weight)
        self._watch.end_micro()
        self._backs += 1
        self._weigh(self._counted)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of epochs up to `count`, from where the run stands."""
        while self._epoch() < count:
            epoch = self.position.epoch
            yield self._epoch()
            self._check_left()
            if self.position.epoch == epoch and self._outer is None:
                # The loader was not run to its end; all ranks left it at the same step.
                self.position = Position(epoch + 1, 0)
                self._join_logs([message["logs"] for message in self._exchange.all(self._tell())])

    def _epoch(self) -> int:
        """Where groups share their parameters, an epoch is as many samples as there are, whoever had them."""
        if self._outer is None or self._loader is None:
            return self.position.epoch
        return self._outer.samples // self._loader.feed.samples

    def log(self, **values: Any) -> None:
        """Figures of this micro-batch. Their weighted means over all ranks are in `history`, step by step."""
        cycle = self._ready()
        if cycle.micro is None:
            raise UserError("run.log was called before the first micro-batch; call it in the loop over the loader")
        if self._counted is None:
            self._unweighed.append(values)  # its weight is known with `backward`
        else:
            self._logs.add(self._logging, self._counted, values)

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, means) of what was logged, in order."""
        return self._logs.history()

    def logged(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """The same from the `start`-th entry on; below 0 counted from the last. History grows with every step."""
        return self._logs.history(start)

    @property
    def checkpoints(self) -> tuple[Saved, ...]:
        """What lies in the folder that was last saved to, the newest first; known to rank 0, once it has saved."""
        return self._checkpoints.kept if self._checkpoints else ()

    @property
    def split(self) -> Split:
        """How the next global batch is cut over the ranks."""
        return self._first if self._loader is None else self._loader.feed.split_at(self.position)

    @property
    def plan(self) -> Plan | None:
        """The plan that was agreed last, if the run has one."""
        return self._plans.now if self._plans else None

    @property
    def measurements(self) -> Measurements | None:
        """The curves of all ranks, where they were measured for the plan."""
        return self._plans.measured if self._plans else None

    @property
    def plan_changes(self) -> list[tuple[int, Plan, str]]:
        """(step, plan, why) for each time that the plan changed."""
        return list(self._plans.changes) if self._plans else []

    def stats(self) -> list[StepStats]:
        """Where the time of each step went, the last thousand steps."""
        return list(self._stats)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, dataset: Any, measure: evaluating.Measure, **loading: Any) -> dict[str, float]:
        """Weighted means over a dataset, every sample once, on all ranks together; the same result on each.

        `measure(model, batch)` gives figures of a batch by name, each a mean over its samples; with an entry `weight`
        if they count by something else.
        """
        if self._cycle and self._cycle.is_open:
            raise UserError("run.evaluate was called inside of a global batch; call it when `not run.in_batch`")
        self._check_all_come("run.evaluate")
        if evaluating.length(dataset, 1) == 0:
            raise UserError("run.evaluate was given a dataset without samples; give it at least one")
        split = self.split.for_samples(min(self.split.total, evaluating.length(dataset, self.split.total)))
        check_loading(loading)
        feed = Feed(dataset, split, self.rank, shuffle=False, device=self.device, **loading)
        training = [module for module in model.modules() if module.training]
        sharding = self._cycle.sharding if self._cycle else None
        cut = sharding if isinstance(sharding, ParametersCut) else None
        model.eval()
        try:
            with self._watch.aside():
                return evaluating.joined(self._exchange.all(evaluating.measured(model, feed, measure, cut)))
        finally:
            for module in training:
                module.training = True

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Plain weights and buffers of the whole model, on the CPU, in any stage. All ranks call it."""
        cycle = self._ready()
        if cycle.is_open:
            raise UserError("run.full_state_dict was called inside of a global batch; call it when `not run.in_batch`")
        self._check_all_come("run.full_state_dict")
        if not isinstance(cycle.sharding, ParametersCut):
            return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        found: dict[str, torch.Tensor] = {}
        for unit in cycle.sharding.units:
            values = cycle.sharding.gathered(unit)
            for piece in unit.pieces:
                found |= dict.fromkeys(piece.names, piece.of(values).cpu().clone())
        persistent = persistent_buffers(model)
        return found | {name: value.detach().cpu().clone() for name, value in persistent.items()}

    def save(self, folder: str | Path | None = None, *, keep: int = 3, wait: bool = False) -> None:
        """Begin a checkpoint, `folder/step-00000120`; it is there when all of it is, and the last `keep` stay.

        The folder is `checkpoints`, or in a job its own: one that is tried again goes on from there.
        Training goes on while it is written. What goes wrong is raised by the next `save` or by `close`, or here with
        `wait`. All ranks call it; those without data in this global batch join in by themselves.
        """
        if self._ready().is_open:
            raise UserError("run.save was called inside of a global batch; call it when `not run.in_batch`")
        assert self._checkpoints
        where = self._folder(folder)
        if wait or self._checkpoints.would_wait(where):
            self._check_all_come("run.save(wait=True)" if wait else "a second run.save")
        with self._watch.aside() if wait else nullcontext():
            self._checkpoints.save(where, keep, wait=wait)

    def load(self, folder: str | Path | None = None) -> bool:
        """Go on from the newest good checkpoint of a folder, or from one itself; False if there is none.

        Whatever the number of ranks, shares and stage with which it was saved. All ranks call it, after `prepare`.
        """
        cycle = self._ready()
        if cycle.is_open:
            raise UserError("run.load was called inside of a global batch; call it before the loop over the loader")
        self._check_all_come("run.load")
        assert self._checkpoints
        with self._watch.aside():
            found = self._checkpoints.load(self._folder(folder))
        if found:
            self.step, self.position = found
            if self._outer:
                _publish(cycle.sharding)
            if self.plan and self._loader is not None:
                self._loader.feed.restart(self.plan.split)
            if self._knobs:
                self._knobs.renew()
        return found is not None

    def _folder(self, given: str | Path | None) -> str:
        usual = self._leaving.folder if self._leaving else Path("checkpoints")
        return str(usual if given is None else given)

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside of a global batch, where nothing global can be done."""
        return self._cycle is not None and self._cycle.is_open

    def close(self) -> None:
        """Give back what the run holds beside the model. Needed only where another run follows in the same process.

        A checkpoint that is being written is waited for, and what went wrong with it is raised.
        In stages 0 to 2 the model goes on by itself; in stage 3 this rank's part of it is gone.
        """
        try:
            if self._checkpoints:
                self._checkpoints.settle()
        finally:
            if self._outer:
                self._outer.close()
            if self._cycle and isinstance(self._cycle.sharding, Sharding):
                self._cycle.sharding.close()
            for group in self._further:
                group.worker.close()
                group.close()
            self._further.clear()

    # What the worker of a job calls

    def leave_when(self, is_asked: Callable[[], bool], folder: Path) -> None:
        """Once `is_asked` says so on any rank, all save to `folder` and end with exit code 75; to be called first.

        What is in the folder already is where `prepare` lets the run go on.
        """
        self._leaving = Leaving(is_asked, folder)

    @property
    def phase(self) -> str:
        """What it is about: starting, profiling, training or saving."""
        return "saving" if self._leaving and self._leaving.is_under_way else self._phase

    @property
    def mode(self) -> str:
        """`sync`, or `hybrid` where groups do not wait for each other; with `mode="auto"` it is known once prepared."""
        return "hybrid" if self._outer else "sync"

    @property
    def group(self) -> int:
        """Which of several groups this is, where they do not wait for each other; else 0."""
        return self._outer.group if self._outer else 0

    @property
    def pushing(self) -> Pushing | None:
        """How it goes with the pushes of this group, where there are groups; the first rank of each knows."""
        return self._outer.now if self._outer and self._outer.is_first else None

    @property
    def aside(self) -> bool:
        """Whether it does something between steps: evaluates, loads, waits for a checkpoint."""
        return self._watch.is_aside

    @property
    def waiting(self) -> Waiting | None:
        """In which collective this rank waits now, and for whom; None while it does not."""
        return self._main.endpoint.control.waiting if self._main else None

    # What the loader calls

    def enter(self, micro: Micro) -> bool:
        """The next micro-step; False if this rank has no data in its global batch, which then is done."""
        cycle = self._ready()
        cycle.enter(micro)
        self._logging, self._counted = self.step, None
        if micro.count:
            self._watch.begin_micro()
            self._precision.begin()
            return True
        self.end_batch()
        return False

    def settle(self) -> None:
        """Finish what the user's loop left undone in the last micro-step."""
        self._precision.end()
        cycle = self._ready()
        cycle.leave()
        if cycle.micro and self._unweighed:
            self._weigh(float(cycle.micro.samples))
        if cycle.may_end:
            self.end_batch()

    def end_batch(self) -> None:
        """The global batch ends on this rank, and with it on all."""
        cycle = self._ready()
        micro = cycle.micro
        assert micro
        outcome = cycle.end()
        self._join_logs([message["logs"] for message in outcome.messages])
        self.position = Position(micro.epoch, micro.batch + 1)
        batches = self._split_of(micro).batches
        self._stats = [*self._stats[-999:], self._watch.step(self.step, batches[self.rank])]
        self.step += 1
        self._ended += 1
        busy = [rank for rank, samples in enumerate(batches) if samples]
        self._leader = busy[0] if len(busy) < self.ranks else None
        if self._leaving and self._leaving.ends:
            self.close()
            raise SystemExit(LEFT)

    def end_epoch(self, epoch: int) -> None:
        """The loader has come to its end."""
        self.position = Position(epoch + 1, 0)
        messages = self._exchange.all({**self._tell(), "backs": self._backs, "asked": self._asked})
        if self._ended and not any(message["backs"] for message in messages):
            raise UserError("run.backward was not called in this epoch; call run.backward(loss) for each micro-batch")
        if self._ended and not any(message["asked"] for message in messages):
            raise UserError(
                "optimizer.step was not called in this epoch, or on an optimizer that was made after run.prepare; call "
                "it on the one that was prepared"
            )
        self._join_logs([message["logs"] for message in messages])
        self._hear(messages)

    def begin_epoch(self) -> None:
        """A loop over the loader begins."""
        self._check_left()
        check_frozen(self._ready().sharding.units)
        self._ready().sharding.check_places()
        self._watch.restart()
        self._began = self._epoch()

    def goes_on(self) -> bool:
        """Whether the loop goes on after a global batch; a rank without data in it does as the others do."""
        if self._leaving:
            self._leave_when_due(self._leaving)
        if self._outer and self._began != self._epoch():
            return False
        leader, self._leader = self._leader, None
        if leader is None or self._word is None:
            return True
        if self.rank == leader:
            self._word.leave(self._ended, {"goes": True})
        micro = self._ready().micro
        if micro is None or micro.count:
            return True
        found = self._word.find(self._ended, leader)
        if "asks" in found:
            raise _not_all_come(str(found["asks"]), self.rank)
        if not found["goes"]:
            self._catch_up([found])
        return bool(found["goes"])

    def begins_again(self) -> bool:
        """Whether the loop goes through the samples once more: until all groups together have had so many."""
        return self._outer is not None and self._began == self._epoch()

    def _leave_when_due(self, leaving: Leaving) -> None:
        last = self._ready().micro
        assert self._checkpoints
        if self.in_batch or last is None or not last.count or self._checkpoints.would_wait(str(leaving.folder)):
            return
        leaving.between_batches(self.save)

    def drawn(self, parts: Iterator[tuple[Micro, Any]]) -> tuple[Micro, Any] | None:
        """The next part, the time for which counts as waiting for the loader."""
        with self._watch.data():
            return next(parts, None)

    def leave_loop(self) -> None:
        """The loop over the loader has ended, however it did."""
        self._precision.end()
        leader, self._leader = self._leader, None
        if self._word and leader == self.rank and not self.in_batch:
            self._word.leave(self._ended, {**self._tell(), "logs": {}, "goes": False})

    # Inside

    def _ready(self) -> Cycle:
        if self._cycle is None:
            raise UserError("nothing is prepared yet; call run.prepare(model, optimizer, dataset) first")
        return self._cycle

    def _tell(self) -> Message:
        """What this rank has to say at the end of a global batch. Alone nothing is looked at: a GPU need not wait."""
        logs = self._logs.message(self.step) if self.ranks > 1 else {}
        assert self._checkpoints
        saves = self._checkpoints.said
        micro = self._ready().micro
        return {
            "calls": [each.calls for each in self._schedulers],
            "logs": logs,
            "saves": saves,
            "knobs": self._knobs.changed() if self._knobs else {},
            "ran": bool(micro and micro.count),
        }

    def _tell_batch(self) -> Message:
        pace = self._plans.tell(self._watch.busy_s()) if self._plans and self.settings.follows else {}
        leaving = {"leaving": self._leaving.tell()} if self._leaving else {}
        return {**self._tell(), "pace": pace, **leaving}

    def _hear_batch(self, messages: Sequence[Message]) -> None:
        self._hear(messages)
        if self._leaving:
            self._leaving.hear([message["leaving"] for message in messages])
        micro = self._ready().micro
        if self._plans and self.settings.follows and micro:
            paces = [message["pace"] for message in messages]
            self._plans.hear(paces, self._split_of(micro), self.step, None)

    def _hear(self, messages: Sequence[Message]) -> None:
        self._catch_up(messages)
        if self._knobs:
            ran = [message["ran"] for message in messages]
            self._knobs.agree([message["knobs"] for message in messages], ran, takes=not ran[self.rank])

    def _catch_up(self, messages: Sequence[Message]) -> None:
        """Before a step, ranks without data do what the others' loops did since the last one."""
        for number, scheduler in enumerate(self._schedulers):
            scheduler.catch_up([message["calls"][number] for message in messages])
        self._join_saves(messages)

    def _join_saves(self, messages: Sequence[Message]) -> None:
        assert self._checkpoints
        self._checkpoints.catch_up([message["saves"] for message in messages])

    def _split_of(self, micro: Micro) -> Split:
        """How the global batch of a micro-step is cut."""
        assert self._loader is not None
        return self._loader.feed.split_at(Position(micro.epoch, micro.batch)).for_samples(micro.total)

    def _standing(self) -> Standing:
        micro = self._ready().micro
        cut = self._split_of(micro) if micro else self.split
        idle = tuple(rank for rank, sizes in enumerate(cut.micro) if not sizes)
        return Standing(self.step, self.position, self.split, self.shares, self.settings.seed, idle)

    def _weigh(self, weight: float) -> None:
        for values in self._unweighed:
            self._logs.add(self._logging, weight, values)
        self._unweighed.clear()

    def _check_left(self) -> None:
        if self.in_batch:
            raise UserError(
                "the loop over the loader was left inside of a global batch; leave it when `not run.in_batch`"
            )

    def _check_all_come(self, what: str) -> None:
        """Refuse what needs all ranks, in a loop whose body a rank without data does not run."""
        leader, self._leader = self._leader, None
        if leader is None or self._word is None:
            return
        if leader == self.rank:
            self._word.leave(self._ended, {"goes": False, "asks": what})
        raise _not_all_come(what, self._standing().idle[0])

    def _check_same(self, dataset: Any, units: Sequence[Unit], optimizer: Optimizer) -> None:
        """All ranks prepare the same."""
        check_steps(optimizer)
        if self._main is None:
            return
        self._knobs = Knobs(optimizer)
        mine = sameness.described(dataset, units, optimizer, self._knobs.all())
        said = self._exchange.all({**mine, "run": secrets.token_hex(8)})
        sameness.compare(said, self.rank)
        self._word = Word(self._main, said[0]["run"])

    def _join_logs(self, messages: Sequence[Any]) -> None:
        if self.ranks == 1:
            self._logs.join_alone(self.step)
        else:
            self._logs.join(messages)

    def _agree(self) -> list[str]:
        """The kinds of devices of all ranks; and that all were given the same settings."""
        mine = self.settings.described()
        said = self._exchange.all({"device": _device_name(self.device), "settings": mine})
        for rank, message in enumerate(said):
            for name, value in message["settings"].items():
                if value != mine[name] and name not in ("quiet",):
                    raise UserError(
                        f"rank {rank} was given {name} = {value!r} and rank {self.rank} {mine[name]!r}; "
                        "give all ranks the same"
                    )
        return [message["device"] for message in said]

    def _precisions(self) -> list[str]:
        return [self.settings.precision_for(rank, device) for rank, device in enumerate(self.devices)]

    def _plan(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, feed: Feed, whole: Whole) -> None:
        """Find the stage, the batches and the shares, where that is asked for. A collective."""
        ground = self._ground(model, optimizer, loss, feed, whole)
        self._phase = "profiling" if self.settings.plan == "profile" else self._phase
        self._plans = Plans(self.rank, feed, quiet=self.settings.quiet)
        first = self._plans.begin(ground)
        if first:
            self.stage, self.shares = first.stage, first.shares

    def _ground(self, model: nn.Module, optimizer: Optimizer, loss: Loss | None, feed: Feed, whole: Whole) -> Ground:
        synced = self._group and self.settings.sync_batchnorm
        return Ground(
            self.settings,
            model,
            optimizer,
            loss,
            feed,
            self._exchange,
            self._main,
            self.rank,
            self.devices,
            self.device,
            self._precisions()[self.rank],
            self._precision.context,
            batchnorm.count(model) if synced else 0,
            whole,
        )

    def _check_compiled(self, model: nn.Module) -> None:
        if self.ranks > 1 and self.stage == 3 and is_compiled(model):
            raise UserError(
                "stage 3 moves parameters while the model runs, which torch.compile does not see; use stage 2"
            )

    def _synchronised(self, model: nn.Module, loss: Loss | None, feed: Feed) -> Callable[[], None] | None:
        """Batch norm over all ranks; how a rank without data takes part in it, if there is any."""
        if not self._group or not self.settings.sync_batchnorm or not batchnorm.count(model):
            return None
        if self.split.rounds > 1 and self.rank == 0 and not self.settings.quiet:
            sys.stderr.write(
                "mimatrix: the model has batch norm, which sees the samples of all ranks but one micro-step at a time; "
                "other micro-steps give other numbers\n"
            )
        group = self._further_group("norm")
        self._watch.groups = (*self._watch.groups, group)
        batchnorm.synchronise(model, group, lambda: self._ready().is_ghost, self._watch)

        def ghost() -> None:
            if loss is None:
                raise UserError(
                    "a rank without data must run the model for its batch norm; give run.prepare loss=..., "
                    "or every rank the same number of micro-batches"
                )
            found = loss(model, feed.sample())
            sharding = self._ready().sharding
            if isinstance(sharding, ParametersCut):
                sharding.back()
            found.backward()  # type: ignore[no-untyped-call]

        return ghost

    def _sharding(self, units: tuple[Unit, ...], optimizer: Optimizer) -> Sharding | Alone:
        if self._main is None or self._group is None:
            return Alone(units)
        if self.stage > 0:
            check_elementwise(optimizer, self.stage)
        gathers = self._further_group("gather") if self.stage == 3 else None
        if gathers:
            self._watch.groups = (*self._watch.groups, gathers)
        may_read = self.stage == 0 and self._outer is None and reads_in_place(self._main, units, optimizer)
        if all(message["reads"] for message in self._exchange.all({"reads": may_read})):
            return GradientsRead(self._main, None, units, self.shares, self._watch)
        return STAGES[self.stage](self._main, gathers, units, self.shares, self._watch)

    def _further_group(self, name: str) -> Group:
        """Another group of all ranks, with a thread of its own."""
        assert self._group
        self._further.append(self._group(name))
        return self._further[-1]

    def _same_buffers(self, model: nn.Module) -> None:
        assert self._main
        for buffer in model.buffers():
            # As bytes: there are buffers of any type, complex ones too.
            same = buffer.detach().contiguous()
            self._main.broadcast(same.reshape(-1).view(torch.uint8))
            buffer.detach().copy_(same)

    def _patch(self, optimizer: Optimizer, model: nn.Module) -> None:
        """The optimizer acts at the end of each global batch, and at no other time."""
        cycle = self._ready()

        def step(closure: Any = None) -> None:
            if closure is not None:
                raise UserError("optimizer.step takes no closure here; call run.backward(loss) before it")
            self._asked = True
            if not cycle.is_open:
                return
            if not cycle.went_back:
                raise UserError("optimizer.step came before run.backward; call run.backward(loss) first")
            if cycle.may_end:
                self.end_batch()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # else schedulers complain
        optimizer.step = step  # type: ignore[method-assign,assignment]
        optimizer.zero_grad = _leave_gradients  # type: ignore[method-assign]
        model.zero_grad = _leave_gradients  # type: ignore[method-assign]
        if isinstance(cycle.sharding, Sharding) and cycle.sharding.stage:
            optimizer.register_state_dict_pre_hook(_refuse_state_dict)
            optimizer.register_load_state_dict_pre_hook(_refuse_load_state_dict)


def check_prepared(model: nn.Module, optimizer: Optimizer, loading: Mapping[str, Any]) -> None:
    """Refuse what `prepare` cannot take, with a sentence."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise UserError("run.prepare takes the model, the optimizer and the dataset; give them in this order")
    check_loading(loading)


@torch.no_grad()
def _publish(sharding: Sharding | Alone) -> None:
    """Other parameters were written than a step gives: all ranks see them."""
    if isinstance(sharding, Sharding):
        sharding.publish()


def _leave_gradients(set_to_none: bool = True) -> None:
    """Gradients end with the step that used them."""


def _refuse_load_state_dict(*_: Any) -> None:
    raise UserError("the optimizer's state is cut over the ranks; load it before run.prepare, or use run.load()")


def _not_all_come(what: str, idle: int) -> UserError:
    return UserError(
        f"rank {idle} has no data in this batch and does not come to {what}; call it after the loop over the loader, "
        "or give every rank data"
    )


def _refuse_state_dict(*_: Any) -> None:
    raise UserError("the optimizer's state is cut over the ranks; use run.save() and run.load()")


def _memory(sharding: Sharding | Alone, binding: Binding) -> dict[str, int]:
    held = sharding.memory if isinstance(sharding, Alone) else sharding.buffers.bytes
    return {**held, "optimizer": binding.state_bytes()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
