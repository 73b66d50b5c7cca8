"""A run: what the user's loop talks to. The loop stays the user's; everything global happens at the end of a batch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine import batchnorm
from mimatrix.engine.alone import Alone
from mimatrix.engine.binding import Binding, check_elementwise
from mimatrix.engine.cycle import Cycle
from mimatrix.engine.exchange import Exchange, Message
from mimatrix.engine.feed import Feed, Micro, Position
from mimatrix.engine.hooks import hear_gradients, hear_modules
from mimatrix.engine.logs import Logs
from mimatrix.engine.precision import LossScale, lower_precision
from mimatrix.engine.settings import Settings
from mimatrix.engine.sharding import STAGES, ParametersCut, Sharding
from mimatrix.engine.stats import StepStats, Watch
from mimatrix.engine.units import Unit, units_of
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
    ) -> None:
        self.settings, self.rank, self.ranks, self.device = settings, rank, ranks, torch.device(device)
        self._group = group if ranks > 1 else None
        self._main = self._group("reduce") if self._group else None
        self._exchange = Exchange(self._main)
        self._watch = Watch((self._main,) if self._main else ())
        self.devices = self._agree()
        batches = resolve_batches(settings.batch, settings.global_batch, self.devices)
        self.split = Split.of(batches, settings.micro_batch)
        self.stage = settings.stage_for(ranks)
        self.shares = settings.shares_for(ranks)
        self.step = 0
        """Global batches done."""
        self.position = Position(0, 0)
        """The next global batch."""
        self._logs = Logs(prints=rank == 0 and not settings.quiet)
        self._cycle: Cycle | None = None
        self._model: nn.Module | None = None
        self._loader: Loader | None = None
        self._schedulers: list[_Scheduler] = []
        self._stats: list[StepStats] = []
        self._logging = 0
        self._counted = 0.0

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
    ) -> tuple[nn.Module, Optimizer, "Loader"]: ...

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        scheduler: LRScheduler,
        /,
        *,
        loss: Loss | None = None,
        whole: Whole = (),
        **loading: Any,
    ) -> tuple[nn.Module, Optimizer, "Loader", LRScheduler]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        scheduler: LRScheduler | None = None,
        /,
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
        feed = Feed(dataset, self.split, self.rank, seed=self.settings.seed, device=self.device, **loading)
        model.to(self.device)
        self._check_compiled(model)
        ghost = self._synchronised(model, loss, feed)
        units = units_of(model, self.settings.unit_bytes, whole)
        sharding = self._sharding(units, optimizer)
        if not isinstance(sharding, Alone):
            self._same_buffers(model)
        known = [piece.parameter for unit in units for piece in unit.pieces]
        binding = Binding(optimizer, sharding.slices(), known)
        scale = LossScale.start(any(name == "fp16" for name in self._precisions()))
        clip = self.settings.clip_norm
        cycle = Cycle(sharding, binding, self._exchange, self._watch, clip_norm=clip, scale=scale, ghost=ghost)
        lower_precision(model, self._precisions()[self.rank], self.device)
        if isinstance(sharding, Sharding):
            hear_gradients(units, cycle.arrived)
        if isinstance(sharding, ParametersCut):
            hear_modules(model, sharding)
        cycle.tell = lambda: {"calls": [each.calls for each in self._schedulers], "logs": self._logs.message(self.step)}
        cycle.hear = self._catch_up
        self._cycle, self._model, self._loader = cycle, model, Loader(self, feed)
        self._watch.memory = partial(_memory, sharding, binding)
        self._patch(optimizer)
        if scheduler is None:
            return model, optimizer, self._loader
        self._schedulers.append(_Scheduler(scheduler, lambda: not cycle.is_open))
        return model, optimizer, self._loader, scheduler

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Gradients of this micro-batch's mean loss. It counts by its samples, or by `weight` (of tokens, say)."""
        self._counted = self._ready().backward(loss, weight)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of epochs up to `count`, from where the run stands."""
        while self.position.epoch < count:
            epoch = self.position.epoch
            yield epoch
            if self.position.epoch == epoch:
                # The loader was not run to its end; all ranks left it at the same step.
                self.position = Position(epoch + 1, 0)

    def log(self, **values: Any) -> None:
        """Figures of this micro-batch. Their weighted means over all ranks are in `history`, step by step."""
        cycle = self._ready()
        if cycle.micro is None:
            raise UserError("run.log was called before the first micro-batch; call it in the loop over the loader")
        self._logs.add(self._logging, self._counted or float(cycle.micro.samples), values)

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, means) of what was logged, in order."""
        return self._logs.history

    def stats(self) -> list[StepStats]:
        """Where the time of each step went, the last thousand steps."""
        return list(self._stats)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, dataset: Any, measure: Callable[..., Any], **loading: Any) -> dict[str, float]:
        """Weighted means over a dataset, every sample once, on all ranks together; the same result on each.

        `measure(model, batch)` gives figures of a batch by name, each a mean over its samples; with an entry `weight`
        if they count by something else.
        """
        if self._cycle and self._cycle.is_open:
            raise UserError("run.evaluate was called inside of a global batch; call it when `not run.in_batch`")
        split = self.split.for_samples(min(self.split.total, _length(dataset, self.split.total)))
        feed = Feed(dataset, split, self.rank, shuffle=False, device=self.device, **loading)
        was_training = model.training
        model.eval()
        sums: dict[str, list[float]] = {}
        sharding = self._cycle.sharding if self._cycle else None
        for micro, batch in feed.epoch(0):
            if micro.count:
                _add_measured(sums, measure(model, batch), micro.samples)
            if isinstance(sharding, ParametersCut) and micro.last:
                for _ in range(micro.count, micro.rounds):
                    sharding.look_without_data()
        model.train(was_training)
        return _joined(self._exchange.all(sums))

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Plain weights and buffers of the whole model, on the CPU, in any stage. All ranks call it."""
        cycle = self._ready()
        if cycle.is_open:
            raise UserError("run.full_state_dict was called inside of a global batch; call it when `not run.in_batch`")
        if not isinstance(cycle.sharding, ParametersCut):
            return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        found: dict[str, torch.Tensor] = {}
        for unit in cycle.sharding.units:
            values = cycle.sharding.gathered(unit)
            for piece in unit.pieces:
                found |= dict.fromkeys(piece.names, piece.of(values).cpu().clone())
        persistent = _persistent_buffers(model)
        return found | {name: value.detach().cpu().clone() for name, value in persistent.items()}

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside of a global batch, where nothing global can be done."""
        return self._cycle is not None and self._cycle.is_open

    # What the loader calls

    def enter(self, micro: Micro) -> bool:
        """The next micro-step; False if this rank has no data in its global batch, which then is done."""
        cycle = self._ready()
        self.settle()
        cycle.enter(micro)
        self._logging, self._counted = self.step, 0.0
        if micro.count:
            return True
        self.end_batch()
        return False

    def settle(self) -> None:
        """Finish what the user's loop left undone in the last micro-step."""
        cycle = self._ready()
        cycle.leave()
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
        self._stats = [*self._stats[-999:], self._watch.step(self.step, micro.samples)]
        self.step += 1

    def end_epoch(self, epoch: int) -> None:
        """The loader has come to its end."""
        self.settle()
        self.position = Position(epoch + 1, 0)
        self._join_logs([message["logs"] for message in self._exchange.all({"logs": self._logs.message(self.step)})])

    def watch_data(self) -> Any:
        """While the loader is waited for."""
        return self._watch.data()

    # Inside

    def _ready(self) -> Cycle:
        if self._cycle is None:
            raise UserError("nothing is prepared yet; call run.prepare(model, optimizer, dataset) first")
        return self._cycle

    def _catch_up(self, messages: Sequence[Message]) -> None:
        """Schedulers of ranks without data step as often as the others' have, before the optimizer does."""
        for number, scheduler in enumerate(self._schedulers):
            scheduler.catch_up(max(message["calls"][number] for message in messages))

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

    def _check_compiled(self, model: nn.Module) -> None:
        if self.ranks > 1 and self.stage == 3 and isinstance(model, torch._dynamo.OptimizedModule):
            raise UserError(
                "stage 3 moves parameters while the model runs, which torch.compile does not see; use stage 2"
            )

    def _synchronised(self, model: nn.Module, loss: Loss | None, feed: Feed) -> Callable[[], None] | None:
        """Batch norm over all ranks; how a rank without data takes part in it, if there is any."""
        if not self._group or not self.settings.sync_batchnorm or not batchnorm.has_batch_norm(model):
            return None
        batchnorm.synchronise(model, self._group("norm"), lambda: self._ready().is_ghost)

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
        gathers = self._group("gather") if self.stage == 3 else None
        self._watch.groups = tuple(group for group in (self._main, gathers) if group)
        return STAGES[self.stage](self._main, gathers, units, self.shares, self._watch)

    def _same_buffers(self, model: nn.Module) -> None:
        assert self._main
        for buffer in model.buffers():
            if buffer.dtype is torch.bool:
                continue
            self._main.broadcast(buffer)

    def _patch(self, optimizer: Optimizer) -> None:
        """The optimizer acts at the end of each global batch, and at no other time."""
        cycle = self._ready()

        def step(closure: Any = None) -> None:
            if closure is not None:
                raise UserError("optimizer.step takes no closure here; call run.backward(loss) before it")
            if not cycle.is_open:
                return
            if not cycle.went_back:
                raise UserError("optimizer.step came before run.backward; call run.backward(loss) first")
            if cycle.may_end:
                self.end_batch()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # else schedulers complain
        optimizer.step = step  # type: ignore[method-assign,assignment]
        optimizer.zero_grad = _leave_gradients  # type: ignore[method-assign]
        if isinstance(cycle.sharding, Sharding) and cycle.sharding.stage:
            optimizer.register_state_dict_pre_hook(_refuse_state_dict)


class Loader:
    """The micro-batches of this rank, on its device."""

    def __init__(self, run: Run, feed: Feed) -> None:
        self._run, self.feed = run, feed

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return len(self.feed)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch in which the run stands."""
        run, position = self._run, self._run.position
        if run.in_batch:
            raise UserError(
                "the loop over the loader was left inside of a global batch; leave it when `not run.in_batch`"
            )
        parts = self.feed.epoch(position.epoch, position.batch)
        while True:
            with run.watch_data():
                found = next(parts, None)
            if found is None:
                break
            micro, batch = found
            if run.enter(micro):
                yield batch
        run.end_epoch(position.epoch)


class _Scheduler:
    """The user's lr scheduler: steps only between global batches, and as often on every rank."""

    def __init__(self, scheduler: LRScheduler, may_step: Callable[[], bool]) -> None:
        self.scheduler, self.calls = scheduler, 0
        self._step, self._may_step = scheduler.step, may_step
        scheduler.step = self.step  # type: ignore[method-assign,assignment]

    def step(self, *arguments: Any) -> None:
        """As the user calls it; nothing inside of a global batch."""
        if self._may_step():
            self.calls += 1
            self._step(*arguments)

    def catch_up(self, calls: int) -> None:
        """On a rank without data the user's loop did not come by: as often as on the others."""
        while self.calls < calls:
            self.calls += 1
            self._step()


def _leave_gradients(set_to_none: bool = True) -> None:
    """Gradients end with the step that used them."""


def _refuse_state_dict(*_: Any) -> None:
    raise UserError("the optimizer's state is cut over the ranks; use run.save() and run.load()")


def _memory(sharding: Sharding | Alone, binding: Binding) -> dict[str, int]:
    held = sharding.memory if isinstance(sharding, Alone) else sharding.buffers.bytes
    return {**held, "optimizer": binding.state_bytes()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _length(dataset: Any, otherwise: int) -> int:
    try:
        return len(dataset)
    except TypeError:
        return otherwise


def _add_measured(sums: dict[str, list[float]], figures: dict[str, Any], samples: int) -> None:
    weight = float(figures.get("weight", samples))
    for name, value in figures.items():
        if name != "weight":
            total = sums.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + float(value) * weight, total[1] + weight


def _joined(messages: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    names = dict.fromkeys(name for message in messages for name in message)
    found = {name: [message[name] for message in messages if name in message] for name in names}
    return {name: sum(total for total, _ in each) / sum(weight for _, weight in each) for name, each in found.items()}


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
