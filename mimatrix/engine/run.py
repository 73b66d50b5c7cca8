"""A run: what the user's loop talks to. The loop stays the user's; everything global happens at the end of a batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.averaged_model import guard_averages
from mimatrix.engine.loop.evaluation import Evaluation, MetricFn
from mimatrix.engine.loop.loader import MicroBatchLoader
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler, check_lr_scheduler, check_same_lr_scheduler
from mimatrix.engine.loop.preemption import Preemption
from mimatrix.engine.loop.prepared_optimizer import PreparedOptimizer
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.mode import Membership, Mode
from mimatrix.engine.not_prepared import NotPrepared
from mimatrix.engine.planning.measure import LossFn
from mimatrix.engine.prepare import LeafModules, PrepareInputs, prepare
from mimatrix.engine.run_hooks import notify
from mimatrix.engine.run_properties import RunProperties
from mimatrix.engine.run_saving import RunSaving
from mimatrix.engine.run_status import RunStatus
from mimatrix.engine.settings import Settings
from mimatrix.engine.user_calls import BACKWARD, END_OF_LOOP, as_user_call, iterate_as_user_call, run_call

ModelT = TypeVar("ModelT", bound=nn.Module)


class Run(RunProperties, RunSaving):
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
        read_ahead: bool = False,
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
        read_ahead: bool = False,
        **loading: Any,
    ) -> tuple[ModelT, PreparedOptimizer, MicroBatchLoader, SyncedLRScheduler]: ...

    @as_user_call(run_call("run.prepare"))
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        scheduler: LRScheduler | None = None,
        *,
        loss: LossFn | None = None,
        leaf_modules: LeafModules = (),
        read_ahead: bool = False,
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
                (`plan="profile"`, `mode="auto"`, and `plan="auto"` does so if it is given), and by ranks without data
                if the model has batch norm.
            leaf_modules: Classes of modules that use their children's parameters without calling the children; stage 3
                gathers such a module as a whole.
            read_ahead: The loop draws the next batch before it trains on this one, as prefetchers and Lightning do.
            **loading: How batches are loaded, by the names of `torch.utils.data.DataLoader`: `shuffle`, `sampler`,
                `batch_sampler` (of global batches), `drop_last`, `collate_fn`, `num_workers`, `prefetch_factor`,
                `pin_memory`. `stream_per_rank`: whether each rank takes its part of a global batch from its own
                iterable dataset, sharded by rank; by default all ranks must read the same samples, which is checked,
                and with False it is not, for a dataset with random augmentation.

        Returns:
            The model, the optimizer and a loader; with a scheduler, the scheduler as a fourth.

        Raises:
            UserError: Something cannot be trained like this; the message says what to change.

        Example:
            >>> model, optimizer, loader = run.prepare(model, optimizer, dataset, loss=loss_fn, num_workers=4)
        """
        if not isinstance(self._loop, NotPrepared):
            raise UserError("run.prepare was called twice; make another run with mimatrix.init for another model")
        optimizer = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        scheduler = scheduler.scheduler if isinstance(scheduler, SyncedLRScheduler) else scheduler
        inputs = PrepareInputs(
            model=model,
            optimizer=optimizer,
            dataset=dataset,
            loss=loss,
            leaf_modules=leaf_modules,
            read_ahead=read_ahead,
            loading=loading,
        )
        inputs.check()
        if scheduler is not None:
            check_lr_scheduler(scheduler, optimizer)
        if self._membership.measures_devices or self.settings.plan_with(has_loss=loss is not None) == "profile":
            self._phase = "profiling"
        self._world = self._membership.settle(inputs)
        # What is settled stays so, also if the rest fails.
        self._membership, self._loop = Membership(self._world), NotPrepared(self._world)
        check_same_lr_scheduler(self._world.exchange, scheduler)
        prepared = prepare(self._world, inputs, scheduler, self._preemption)
        self._loop = prepared.loop
        guard_averages(model, prepared.loop)
        if self._preemption:
            self.load(self._preemption.folder)
        self._phase = "training"
        result = (model, prepared.optimizer, prepared.loader)
        return result if scheduler is None else (*result, prepared.lr_scheduler)

    @as_user_call(run_call("run.prepare_scheduler"))
    def prepare_scheduler(self, scheduler: LRScheduler) -> SyncedLRScheduler:
        """Prepare a learning-rate scheduler that was made after `prepare`, such as for `len(loader)` steps.

        All ranks call it, before the loop. Step what it returns: that acts between global batches, and equally often on
        every rank.

        Args:
            scheduler: A scheduler of the optimizer that `prepare` returned.

        Returns:
            The scheduler to step.

        Raises:
            UserError: It is of another optimizer, or ranks give different ones.

        Example:
            >>> scheduler = run.prepare_scheduler(OneCycleLR(optimizer, 0.1, epochs=10, steps_per_epoch=len(loader)))
        """
        loop = self._prepared()
        if isinstance(scheduler, SyncedLRScheduler):
            raise UserError("the scheduler is prepared already; step the one that you have")
        check_lr_scheduler(scheduler, loop.optimizer.optimizer)
        loop.check_between_batches("run.prepare_scheduler", "before the loop over the loader")
        loop.require_all_ranks("run.prepare_scheduler")
        check_same_lr_scheduler(self._world.exchange, scheduler)
        return loop.add_lr_scheduler(scheduler)

    @as_user_call(BACKWARD)
    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Compute the gradients of this micro-batch, in place of `loss.backward()`.

        Args:
            loss: The mean loss of the micro-batch.
            weight: How much the micro-batch counts, such as its number of tokens; by default its number of samples.
        """
        self._prepared().backward(loss, weight)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to `count`, starting where the run is."""
        return iterate_as_user_call(self._world.caller, END_OF_LOOP, self._prepared().run_epochs(count))

    def log(self, /, *unnamed: Any, **values: Any) -> None:
        """Log metrics, for `history`, the job's curves and TensorBoard.

        In the loop's body they are of this micro-batch: what is recorded are weighted means over all ranks, step by
        step. Outside, as after `run.evaluate`, they are recorded at once and as they are, under the number of
        steps done: give the same on all ranks, or log on rank 0 alone, whose values are those of the job.

        Args:
            *unnamed: Refused: wandb's `log({"loss": loss})` is `log(loss=loss)` here.
            **values: Numbers, or tensors with one element. NaN and infinities are recorded, too.

        Raises:
            UserError: A value is not a number, or has no name.

        Example:
            >>> run.log(loss=loss, accuracy=accuracy)
        """
        if unnamed:
            raise UserError("run.log was given a value without a name; give names: run.log(loss=...), or **metrics")
        self._prepared().log(values)

    @as_user_call(run_call("run.evaluate"))
    @torch.no_grad()
    def evaluate(self, model: nn.Module, dataset: Any, metric_fn: MetricFn, **loading: Any) -> dict[str, float]:
        """Compute weighted means of metrics over a dataset, each sample once, on all ranks together.

        Args:
            model: The prepared model, or another one with the same weights on all ranks, such as an average of it.
            dataset: What to evaluate on, the same on all ranks: a dataset or a DataLoader.
            metric_fn: `metric_fn(model, batch)` returns metrics of a batch by name, each a mean over its samples, with
                the same names for every batch; an entry `weight` says how much the batch counts, if not by its samples.
            **loading: As for `prepare`; not shuffled by default.

        Returns:
            The means by name, the same on every rank.

        Raises:
            UserError: Ranks were given different datasets or models, or the metric function returned what has no mean.

        Example:
            >>> run.log(**run.evaluate(model, held_out, lambda model, batch: {"val_loss": loss_fn(model, batch)}))
        """
        self._loop.check_between_batches("run.evaluate")
        self._loop.require_all_ranks("run.evaluate")
        evaluation = Evaluation(self._world, self.split, self._loop.strategy, metric_fn)
        return evaluation.run(model, evaluation.open(model, dataset, loading, self._loop.metrics, self.step))

    @as_user_call(run_call("run.close"))
    def close(self) -> None:
        """Release what the run holds besides the model; needed only if another run follows in the same process.

        Waits for a checkpoint that is being written, and raises what went wrong with it. In stages 0 to 2 the model
        can be used afterwards; in stage 3 this rank's shards of it are gone. Call it last, on all ranks.
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

    def flush_log(self) -> None:
        """Record what was logged and waits for ranks to meet: the script has ended."""
        self._loop.metrics.finish(self.step)

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


def start_run(mode: Mode, settings: Settings, device: torch.device, timeout_s: float) -> Run:
    """Join the other processes of the job in a mode, and return this process's run. A collective."""
    run = Run(mode.join(settings, device, timeout_s))
    notify(run)
    return run
