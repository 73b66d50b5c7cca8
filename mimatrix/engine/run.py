"""A run: what the user's loop talks to. The loop stays the user's; everything global happens at the end of a batch."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.comm.control.client import WaitStatus
from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import DEFAULT_KEEP
from mimatrix.engine.checkpoint.state import persistent_buffers
from mimatrix.engine.checkpoint.storage import CheckpointInfo
from mimatrix.engine.data.loading import check_loading
from mimatrix.engine.data.source import DataPosition, MicroBatchSource
from mimatrix.engine.loop import evaluation as evaluating
from mimatrix.engine.loop.loader import MicroBatchLoader
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.preemption import Preemption
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.outer_optimizer import OuterOptimizer, PushStats
from mimatrix.engine.planning.measure import LossFn, PrepareContext
from mimatrix.engine.planning.plan_follower import PlanFollower
from mimatrix.engine.prepare import LeafModules, agreed, check_prepared, cut, ground_of, patch, units_to_cut
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepStats
from mimatrix.engine.world import World
from mimatrix.engine.zero.zero3 import Zero3
from mimatrix.planner.plan import Plan
from mimatrix.planner.profile import Measurements
from mimatrix.planner.split import Split


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
        outer: OuterOptimizer | None = None,
    ) -> None:
        self._outer = outer
        self.rank, self.ranks, self.device = rank, ranks, torch.device(device)
        self._world = World(settings, group, rank, ranks, self.device)
        self.devices = self._world.devices
        self.stage = settings.stage_for()
        self.shares = settings.shares_for(ranks)
        self._course: TrainLoop | None = None
        """Once there is something prepared."""
        self._leaving: Preemption | None = None
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
        loss: LossFn | None = None,
        whole: LeafModules = (),
        **loading: Any,
    ) -> tuple[nn.Module, Optimizer, MicroBatchLoader]: ...

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        /,
        scheduler: LRScheduler,
        *,
        loss: LossFn | None = None,
        whole: LeafModules = (),
        **loading: Any,
    ) -> tuple[nn.Module, Optimizer, MicroBatchLoader, LRScheduler]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        /,
        scheduler: LRScheduler | None = None,
        *,
        loss: LossFn | None = None,
        whole: LeafModules = (),
        **loading: Any,
    ) -> Any:
        """Split a model and its optimizer over the ranks and its data into micro-batches. All ranks call it.

        The same objects come back, and a loader. `loss` is needed where a rank without data must run the model all
        the same (synchronised batch norm). `whole`: classes of modules that use their children's parameters without
        running the children, which matters in stage 3. `loading`: `shuffle`, `drop_last`, `collate_fn`, `num_workers`,
        `prefetch_factor`, `pin_memory`.
        """
        if self._course:
            raise UserError("run.prepare was called twice; make another run with mimatrix.init for another model")
        check_prepared(model, optimizer, loading)
        world = self._world
        feed = MicroBatchSource(
            dataset, world.split, self.rank, seed=world.settings.seed, device=self.device, **loading
        )
        model.to(self.device)
        ground = ground_of(world, model, optimizer, loss, feed, whole)
        plans = self._plan(ground)
        units = units_to_cut(world, ground, self.stage)
        said = agreed(world, dataset, units, optimizer)
        cycle = cut(world, ground, units, self.stage, self.shares, self._outer)
        course = TrainLoop(
            world, model, cycle, feed, plans, self.shares, agreed=said, outer=self._outer, leaving=self._leaving
        )
        patch(ground, cycle, course.asked_to_step)
        if scheduler is not None:
            course.schedulers.append(SyncedLRScheduler(scheduler, cycle))
        self._course = course
        if self._leaving:
            self.load(self._leaving.folder)
        self._phase = "training"
        found = (model, optimizer, MicroBatchLoader(course))
        return found if scheduler is None else (*found, scheduler)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Gradients of this micro-batch's mean loss. It counts by its samples, or by `weight` (of tokens, say)."""
        self._ready().backward(loss, weight)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of epochs up to `count`, from where the run stands."""
        yield from self._ready().run_epochs(count)

    def log(self, **values: Any) -> None:
        """Figures of this micro-batch. Their weighted means over all ranks are in `history`, step by step."""
        self._ready().log(values)

    @property
    def settings(self) -> Settings:
        """What `mimatrix.init` was given."""
        return self._world.settings

    @property
    def step(self) -> int:
        """Global batches done."""
        return self._course.step if self._course else 0

    @property
    def position(self) -> DataPosition:
        """The next global batch."""
        return self._course.position if self._course else DataPosition(0, 0)

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, means) of what was logged, in order."""
        return self.logged(0)

    def logged(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """The same from the `start`-th entry on; below 0 counted from the last. History grows with every step."""
        return self._course.logs.history(start) if self._course else []

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """What lies in the folder that was last saved to, the newest first; known to rank 0, once it has saved."""
        return self._course.checkpoints.saved if self._course else ()

    @property
    def split(self) -> Split:
        """How the next global batch is cut over the ranks."""
        return self._course.split if self._course else self._world.split

    @property
    def plan(self) -> Plan | None:
        """The plan that was agreed last, if the run has one."""
        return self._course.plans.current if self._course else None

    @property
    def measurements(self) -> Measurements | None:
        """The curves of all ranks, where they were measured for the plan."""
        return self._course.plans.measured if self._course else None

    @property
    def plan_changes(self) -> list[tuple[int, Plan, str]]:
        """(step, plan, why) for each time that the plan changed."""
        return list(self._course.plans.changes) if self._course else []

    def stats(self) -> list[StepStats]:
        """Where the time of each step went, the last thousand steps."""
        return list(self._course.stats) if self._course else []

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, dataset: Any, measure: evaluating.MetricFn, **loading: Any
    ) -> dict[str, float]:
        """Weighted means over a dataset, every sample once, on all ranks together; the same result on each.

        `measure(model, batch)` gives figures of a batch by name, each a mean over its samples; with an entry `weight`
        if they count by something else.
        """
        course = self._course
        if course:
            course.check_closed("run.evaluate")
            course.check_all_come("run.evaluate")
        if evaluating.length(dataset, 1) == 0:
            raise UserError("run.evaluate was given a dataset without samples; give it at least one")
        split = self.split.for_samples(min(self.split.total, evaluating.length(dataset, self.split.total)))
        check_loading(loading)
        feed = MicroBatchSource(dataset, split, self.rank, shuffle=False, device=self.device, **loading)
        training = [module for module in model.modules() if module.training]
        sharding = course.cycle.sharding if course else None
        gathers = sharding if isinstance(sharding, Zero3) else None
        model.eval()
        try:
            with self._world.watch.aside():
                mine = evaluating.measured(model, feed, measure, gathers)
                return evaluating.joined(self._world.exchange.all(mine))
        finally:
            for module in training:
                module.training = True

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Plain weights and buffers of the whole model, on the CPU, in any stage. All ranks call it."""
        course = self._ready()
        course.check_closed("run.full_state_dict")
        course.check_all_come("run.full_state_dict")
        sharding = course.cycle.sharding
        if not isinstance(sharding, Zero3):
            return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        found: dict[str, torch.Tensor] = {}
        for unit in sharding.units:
            values = sharding.gathered(unit)
            for piece in unit.pieces:
                found |= dict.fromkeys(piece.names, piece.of(values).cpu().clone())
        persistent = persistent_buffers(model)
        return found | {name: value.detach().cpu().clone() for name, value in persistent.items()}

    def save(self, folder: str | Path | None = None, *, keep: int = DEFAULT_KEEP, wait: bool = False) -> None:
        """Begin a checkpoint, `folder/step-00000120`; it is there when all of it is, and the last `keep` stay.

        The folder is `checkpoints`, or in a job its own: one that is tried again goes on from there.
        Training goes on while it is written. What goes wrong is raised by the next `save` or by `close`, or here with
        `wait`. All ranks call it; those without data in this global batch join in by themselves.
        """
        course, where = self._ready(), self._folder(folder)
        course.check_closed("run.save")
        if wait or course.checkpoints.would_wait(where):
            course.check_all_come("run.save(wait=True)" if wait else "a second run.save")
        with self._world.watch.aside() if wait else nullcontext():
            course.checkpoints.save(where, keep, wait=wait)

    def load(self, folder: str | Path | None = None) -> bool:
        """Go on from the newest good checkpoint of a folder, or from one itself; False if there is none.

        Whatever the number of ranks, shares and stage with which it was saved. All ranks call it, after `prepare`.
        """
        course = self._ready()
        course.check_closed("run.load", "before the loop over the loader")
        course.check_all_come("run.load")
        return course.load(self._folder(folder))

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside of a global batch, where nothing global can be done."""
        return self._course is not None and self._course.cycle.is_open

    def close(self) -> None:
        """Give back what the run holds beside the model. Needed only where another run follows in the same process.

        A checkpoint that is being written is waited for, and what went wrong with it is raised.
        In stages 0 to 2 the model goes on by itself; in stage 3 this rank's part of it is gone.
        """
        if self._course:
            self._course.close()
            return
        if self._outer:
            self._outer.close()
        self._world.close()

    # What the worker of a job calls

    def leave_when(self, is_asked: Callable[[], bool], folder: Path) -> None:
        """Once `is_asked` says so on any rank, all save to `folder` and end with exit code 75; to be called first.

        What is in the folder already is where `prepare` lets the run go on.
        """
        self._leaving = Preemption(is_asked, folder)

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
    def pushing(self) -> PushStats | None:
        """How it goes with the pushes of this group, where there are groups; the first rank of each knows."""
        return self._outer.now if self._outer and self._outer.is_first else None

    @property
    def aside(self) -> bool:
        """Whether it does something between steps: evaluates, loads, waits for a checkpoint."""
        return self._world.watch.is_aside

    @property
    def waiting(self) -> WaitStatus | None:
        """In which collective this rank waits now, and for whom; None while it does not."""
        main = self._world.main
        return main.endpoint.control.waiting if main else None

    # Inside

    def _ready(self) -> TrainLoop:
        if self._course is None:
            raise UserError("nothing is prepared yet; call run.prepare(model, optimizer, dataset) first")
        return self._course

    def _plan(self, ground: PrepareContext) -> PlanFollower:
        """Find the stage, the batches and the shares, where that is asked for. A collective."""
        self._phase = "profiling" if self.settings.plan == "profile" else self._phase
        plans = PlanFollower(self.rank, ground.source, quiet=self.settings.quiet)
        first = plans.begin(ground)
        if first:
            self.stage, self.shares = first.stage, first.shares
        return plans

    def _folder(self, given: str | Path | None) -> str:
        usual = self._leaving.folder if self._leaving else Path("checkpoints")
        return str(usual if given is None else given)
