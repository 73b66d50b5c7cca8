"""A run: what the user's loop talks to. The loop stays the user's; everything global happens at the end of a batch."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import DEFAULT_KEEP
from mimatrix.engine.checkpoint.storage import CheckpointInfo
from mimatrix.engine.data.loading import check_loading, dataset_size
from mimatrix.engine.data.source import DataPosition, MicroBatchSource
from mimatrix.engine.loop.idle_ranks import SyncedLRScheduler
from mimatrix.engine.loop.loader import MicroBatchLoader
from mimatrix.engine.loop.metrics import MetricFn, evaluate, merge_means
from mimatrix.engine.loop.preemption import Preemption
from mimatrix.engine.loop.prepared_optimizer import PreparedOptimizer
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.mode import Membership, Mode
from mimatrix.engine.not_prepared import NotPrepared
from mimatrix.engine.planning.measure import LossFn
from mimatrix.engine.prepare import LeafModules, PrepareInputs, prepare
from mimatrix.engine.run_hooks import notify
from mimatrix.engine.run_status import RunStatus
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepStats
from mimatrix.planner.modes import Choice
from mimatrix.planner.plan import Plan
from mimatrix.planner.profile import Measurements
from mimatrix.planner.split import Split

ModelT = TypeVar("ModelT", bound=nn.Module)


class Run:
    """One rank of a training run, as `mimatrix.init` returns it.

    Attributes that are known before `prepare`: `rank`, `world_size`, `device`, `devices`, `settings`.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._world = membership.world
        self._loop: TrainLoop | NotPrepared = NotPrepared(self._world)
        self._preemption: Preemption | None = None
        self._phase = "starting"

    # What the user's loop calls

    @overload
    def prepare(
        self,
        model: ModelT,
        optimizer: Optimizer,
        dataset: Any,
        *,
        loss: LossFn | None = None,
        leaf_modules: LeafModules = (),
        **loading: Any,
    ) -> tuple[ModelT, PreparedOptimizer, MicroBatchLoader]: ...

    @overload
    def prepare(
        self,
        model: ModelT,
        optimizer: Optimizer,
        dataset: Any,
        scheduler: LRScheduler,
        *,
        loss: LossFn | None = None,
        leaf_modules: LeafModules = (),
        **loading: Any,
    ) -> tuple[ModelT, PreparedOptimizer, MicroBatchLoader, SyncedLRScheduler]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        scheduler: LRScheduler | None = None,
        *,
        loss: LossFn | None = None,
        leaf_modules: LeafModules = (),
        **loading: Any,
    ) -> Any:
        """Distribute a model, its optimizer and its data over the ranks. All ranks call it, once.

        Use what it returns from then on. The model is the same object, on its device; the optimizer and the scheduler
        are wrappers whose `step` acts at the end of each global batch; the loader yields this rank's micro-batches.

        Args:
            model: The model. Move, cast and load it before.
            optimizer: An optimizer over its parameters.
            dataset: A map-style or iterable dataset, or a DataLoader, whose settings are then used.
            scheduler: A learning-rate scheduler of the optimizer; step it once for each micro-batch or epoch.
            loss: `loss(model, batch)` returns the mean loss of a batch. Needed to measure devices
                (`plan="profile"`, `mode="auto"`), and by ranks without data if the model has batch norm.
            leaf_modules: Classes of modules that use their children's parameters without calling the children; stage 3
                gathers such a module as a whole.
            **loading: How batches are loaded, by the names of `torch.utils.data.DataLoader`: `shuffle`, `drop_last`,
                `collate_fn`, `num_workers`, `prefetch_factor`, `pin_memory`.

        Returns:
            The model, the optimizer and a loader; with a scheduler, the scheduler as a fourth.

        Raises:
            UserError: Something cannot be trained like this; the message says what to change.

        Example:
            >>> model, optimizer, loader = run.prepare(model, optimizer, dataset, loss=loss_fn, num_workers=4)
        """
        if not isinstance(self._loop, NotPrepared):
            raise UserError("run.prepare was called twice; make another run with mimatrix.init for another model")
        if isinstance(optimizer, PreparedOptimizer):
            optimizer = optimizer.optimizer
        if isinstance(scheduler, SyncedLRScheduler):
            scheduler = scheduler.scheduler
        inputs = PrepareInputs(
            model=model, optimizer=optimizer, dataset=dataset, loss=loss, leaf_modules=leaf_modules, loading=loading
        )
        inputs.check()
        if self._membership.measures_devices or self.settings.plan == "profile":
            self._phase = "profiling"
        self._world = self._membership.settle(inputs)
        # What is settled stays so, also if the rest fails.
        self._membership, self._loop = Membership(self._world), NotPrepared(self._world)
        prepared = prepare(self._world, inputs, scheduler, self._preemption)
        self._loop = prepared.loop
        if self._preemption:
            self.load(self._preemption.folder)
        self._phase = "training"
        result = (model, prepared.optimizer, prepared.loader)
        return result if scheduler is None else (*result, prepared.lr_scheduler)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Compute the gradients of this micro-batch, in place of `loss.backward()`.

        Args:
            loss: The mean loss of the micro-batch.
            weight: How much the micro-batch counts, such as its number of tokens; by default its number of samples.
        """
        self._prepared().backward(loss, weight)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to `count`, starting where the run is."""
        yield from self._prepared().run_epochs(count)

    def log(self, **values: Any) -> None:
        """Log metrics of this micro-batch; their weighted means over all ranks are in `history`, step by step."""
        self._prepared().log(values)

    @property
    def rank(self) -> int:
        """The rank of this process; in hybrid mode within its group."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks; in hybrid mode of this group."""
        return self._world.world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._world.device

    @property
    def devices(self) -> list[str]:
        """The names of all ranks' devices."""
        return self._world.devices

    @property
    def settings(self) -> Settings:
        """What `mimatrix.init` was given."""
        return self._world.settings

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self._loop.stage

    @property
    def shares(self) -> Shares:
        """The part of the sharded states that each rank owns."""
        return self._loop.shares

    @property
    def step(self) -> int:
        """The number of global batches done."""
        return self._loop.step

    @property
    def position(self) -> DataPosition:
        """The next global batch: its epoch, and its number in the epoch."""
        return self._loop.position

    @property
    def split(self) -> Split:
        """How the next global batch is split over the ranks."""
        return self._loop.split

    @property
    def in_batch(self) -> bool:
        """Whether this rank is inside a global batch, where collective calls such as `save` are refused."""
        return self._loop.in_batch

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, means) of what was logged, in order."""
        return self.history_from(0)

    def history_from(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """Return `history` from the `start`-th entry on; negative numbers count from the last."""
        return self._loop.metrics.history(start)

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """The checkpoints in the folder that was last saved to, newest first; known to rank 0 once it has saved."""
        return self._loop.saved

    @property
    def plan(self) -> Plan | None:
        """The plan that was agreed on last, if the run has one."""
        return self._loop.plan

    @property
    def plan_changes(self) -> list[tuple[int, Plan, str]]:
        """(step, plan, reason) for each change of the plan."""
        return list(self._loop.plan_changes)

    @property
    def measurements(self) -> Measurements | None:
        """The profiles of all ranks, where they were measured for the plan."""
        return self._loop.measurements

    @property
    def mode_choice(self) -> Choice | None:
        """What `mode="auto"` chose in `prepare`, from what, and why."""
        return self._world.choice

    def stats(self) -> list[StepStats]:
        """Return where the time of each step went, for the last thousand steps."""
        return list(self._loop.stats)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, dataset: Any, metric_fn: MetricFn, **loading: Any) -> dict[str, float]:
        """Compute weighted means of metrics over a dataset, each sample once, on all ranks together.

        Args:
            model: The prepared model.
            dataset: What to evaluate on.
            metric_fn: `metric_fn(model, batch)` returns metrics of a batch by name, each a mean over its samples; an
                entry `weight` says how much the batch counts, if not by its samples.
            **loading: As for `prepare`.

        Returns:
            The means by name, the same on every rank.
        """
        self._loop.check_between_batches("run.evaluate")
        self._loop.require_all_ranks("run.evaluate")
        size = dataset_size(dataset)
        if size == 0:
            raise UserError("run.evaluate was given a dataset without samples; give it at least one")
        split = self.split.for_samples(self.split.total if size is None else min(self.split.total, size))
        check_loading(loading)
        source = MicroBatchSource(dataset, split, self.rank, shuffle=False, device=self.device, **loading)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with self._world.timer.excluded():
                means = evaluate(model, source, metric_fn, self._loop.strategy)
                return merge_means(self._world.exchange.all_gather(means.sums()))
        finally:
            for module in training:
                module.training = True

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the weights and buffers of the whole model on the CPU, in any stage. All ranks call it."""
        loop = self._prepared()
        loop.check_between_batches("run.full_state_dict")
        loop.require_all_ranks("run.full_state_dict")
        return loop.strategy.full_state_dict(model)

    def save(self, folder: str | Path | None = None, *, keep: int = DEFAULT_KEEP, wait: bool = False) -> None:
        """Begin a checkpoint; training continues while it is written, and it appears only once it is complete.

        All ranks call it; those without data in this global batch take part by themselves. A failure is raised by the
        next `save`, by `close`, or here with `wait`.

        Args:
            folder: Where checkpoints go, as `folder/step-00000120`. By default `checkpoints`, or in a job the job's
                own folder, from which it resumes.
            keep: How many checkpoints of the folder to keep.
            wait: Return only when the checkpoint is complete.
        """
        loop, path = self._prepared(), self._checkpoint_folder(folder)
        loop.check_between_batches("run.save")
        if wait or loop.checkpoints.would_wait(path, loop.step):
            loop.require_all_ranks("run.save(wait=True)" if wait else "a second run.save")
        with self._world.timer.excluded() if wait else nullcontext():
            loop.save(path, keep, wait=wait)

    def load(self, folder: str | Path | None = None) -> bool:
        """Resume from the newest complete checkpoint of a folder, or from a checkpoint itself.

        Stage, shares and number of ranks may differ from those it was saved with. All ranks call it, after `prepare`.

        Returns:
            False if there is no checkpoint.
        """
        loop = self._prepared()
        loop.check_between_batches("run.load", "before the loop over the loader")
        loop.require_all_ranks("run.load")
        return loop.load(self._checkpoint_folder(folder))

    def close(self) -> None:
        """Release what the run holds besides the model; needed only if another run follows in the same process.

        Waits for a checkpoint that is being written, and raises what went wrong with it. In stages 0 to 2 the model
        can be used afterwards; in stage 3 this rank's shards of it are gone.
        """
        self._loop.close()

    # What the worker of a job calls

    def enable_preemption(self, is_requested: Callable[[], bool], folder: Path) -> None:
        """Stop with exit code 75 after a checkpoint, once `is_requested` returns true on any rank.

        Args:
            is_requested: Asked at the end of each global batch.
            folder: Where the checkpoint goes; `prepare` resumes from what is there already. Call this before it.
        """
        self._preemption = Preemption(is_requested, folder)

    @property
    def status(self) -> RunStatus:
        """What this rank is doing now, for monitoring."""
        outer, main = self._world.outer, self._world.main
        is_saving = self._preemption is not None and self._preemption.is_under_way
        return RunStatus(
            phase="saving" if is_saving else self._phase,
            mode="hybrid" if outer else "sync",
            group=outer.group if outer else 0,
            pushes=outer.stats if outer and outer.is_first else None,
            is_excluded=self._world.timer.is_excluded,
            waiting=main.endpoint.control.waiting if main else None,
        )

    def _prepared(self) -> TrainLoop:
        if isinstance(self._loop, NotPrepared):
            raise UserError("nothing is prepared yet; call run.prepare(model, optimizer, dataset) first")
        return self._loop

    def _checkpoint_folder(self, given: str | Path | None) -> str:
        default = self._preemption.folder if self._preemption else Path("checkpoints")
        return str(default if given is None else given)


def start_run(mode: Mode, settings: Settings, device: torch.device, timeout_s: float) -> Run:
    """Join the other processes of the job in a mode, and return this process's run. A collective."""
    run = Run(mode.join(settings, device, timeout_s))
    notify(run)
    return run
