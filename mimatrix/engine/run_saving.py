"""The part of a run that keeps things: checkpoints, the script's own state, and full weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import DEFAULT_FOLDER, DEFAULT_KEEP
from mimatrix.engine.checkpoint.metric import Metric
from mimatrix.engine.checkpoint.storage import CheckpointInfo
from mimatrix.engine.loop.preemption import Preemption
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.modules.averaged_weights import AveragedWeights, Kind
from mimatrix.engine.not_prepared import NotPrepared
from mimatrix.engine.user_calls import as_user_call, run_call
from mimatrix.engine.weight_average import EMA, SWA
from mimatrix.engine.world import World


class RunSaving(ABC):
    """What `Run` saves and loads."""

    _world: World
    _loop: TrainLoop | NotPrepared
    _preemption: Preemption | None

    @abstractmethod
    def _prepared(self) -> TrainLoop:
        """Return the training loop; refuse if nothing is prepared yet."""

    @as_user_call(run_call("run.save"))
    def save(
        self,
        folder: str | Path | None = None,
        *,
        keep: int = DEFAULT_KEEP,
        wait: bool = False,
        user_state: Mapping[str, Any] | None = None,
        metric: float | torch.Tensor | None = None,
        best: Literal["max", "min"] = "max",
    ) -> None:
        """Begin a checkpoint; training continues while it is written, and it appears only once it is complete.

        All ranks call it, with the same arguments; those without data in this global batch take part by themselves. If
        a disk fails or is full, that is logged and training continues; the failure is raised by `close` if the last
        save failed, by the next save after `max_failed_saves` in a row (see `mimatrix.init`), and here with `wait`. If
        the script ends before, the process exits with code 1. A failure that the script is to blame for is raised by
        the next `save`, or is exit code 2. A second call for the same step and folder replaces the checkpoint if it is
        given `user_state` or another metric, and otherwise does nothing.

        Args:
            folder: Where checkpoints go, as `folder/step-00000120`. By default `checkpoints`, or in a job the job's
                own folder, from which it resumes.
            keep: How many checkpoints of the folder to keep: the newest, or the best by `metric`. Periodic ones are
                kept while they are among the newest `keep` of all, and never push out those of the script. If the
                disk has no room for one more, the oldest is removed before; the newest stays until the new one is
                complete.
            wait: Return only when the checkpoint is complete.
            user_state: What the script wants back as `run.user_state` after `load`: dicts, lists and tuples of
                numbers, strings and tensors, the same on all ranks. By default what it gave last, or loaded. Of tensors
                of floats only the shapes are compared, and rank 0's are kept. Nothing else is written: a checkpoint
                holds plain data, so that loading one runs no code.
            metric: A number, the same on all ranks, such as a result of `evaluate`: only the `keep` best checkpoints
                of the folder are kept, and one that is not among them, or whose metric is NaN, is not written. All
                checkpoints of such a folder are saved with a metric; name a folder for it.
            best: Whether the largest ("max") or the smallest ("min") metric is best.

        Raises:
            UserError: An argument is wrong, or the call came inside a global batch.
            SaveError: Checkpoints could not be saved, or with `wait` this one.

        Example:
            >>> run.save(user_state={"best_accuracy": best})
            >>> run.save("best", keep=1, metric=accuracy)
        """
        loop, path = self._prepared(), self._folder_of(folder)
        loop.check_between_batches("run.save")
        loop.checkpoints.averages.check_not_applied("run.save was called")
        by = None if metric is None else Metric.of(metric, best)
        if by and Path(path).absolute() == Path(self._folder_of(None)).absolute():
            raise UserError(
                f"run.save was given a metric for {path}, where the newest checkpoints are kept; give it a folder of "
                'its own, such as run.save("best", metric=...)'
            )
        if wait or loop.checkpoints.would_wait(path, loop.step, has_user_state=user_state is not None, metric=by):
            loop.require_all_ranks("run.save(wait=True)" if wait else "a second run.save")
        with self._world.timer.excluded() if wait else nullcontext():
            loop.checkpoints.save(path, keep, loop.progress(), wait=wait, user_state=user_state, metric=by)

    @as_user_call(run_call("run.load"))
    def load(self, folder: str | Path | None = None) -> bool:
        """Resume from the newest complete checkpoint of a folder, or from a checkpoint itself.

        Stage, shares and number of ranks may differ from those it was saved with. All ranks call it, after `prepare`.
        If the folder keeps checkpoints by a metric, the best one is loaded. `user_state` then has what was saved.

        Returns:
            False if there is no checkpoint.
        """
        loop = self._prepared()
        loop.check_between_batches("run.load", "before the loop over the loader")
        loop.require_all_ranks("run.load")
        loop.checkpoints.averages.check_not_applied("run.load was called")
        return loop.load(self._folder_of(folder))

    @as_user_call(run_call("run.full_state_dict"))
    def full_state_dict(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Return the weights and buffers of the whole model on the CPU, in any stage. All ranks call it.

        Args:
            model: The prepared model; may be omitted.
        """
        loop = self._prepared()
        loop.check_between_batches("run.full_state_dict")
        loop.require_all_ranks("run.full_state_dict")
        return loop.strategy.full_state_dict(loop.checkpoints.model if model is None else model)

    def register_user_state(self, get_state: Callable[[], Mapping[str, Any]]) -> None:
        """Let every save that is given no `user_state` take what `get_state` returns, periodic saves included.

        Call it on all ranks, after `prepare`. `get_state` is called between two global batches, after what the loop did
        in the last one, on all ranks that had data in it, and returns the same on all of them.

        Args:
            get_state: Returns what `run.save(user_state=...)` takes.

        Example:
            >>> run.register_user_state(lambda: {"best_accuracy": best})
        """
        self._prepared().checkpoints.get_user_state = get_state

    @property
    def user_state(self) -> dict[str, Any]:
        """The state of the script from the checkpoint that was loaded, tensors on the CPU; {} if there is none.

        After `save(user_state=...)` what it was given.
        """
        return {} if isinstance(self._loop, NotPrepared) else self._loop.checkpoints.user_state

    @property
    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """The checkpoints in the folder that was last saved to; known to rank 0 once it has saved.

        The newest comes first, or where they have a metric the best.
        """
        return () if isinstance(self._loop, NotPrepared) else self._loop.checkpoints.saved

    @as_user_call(run_call("run.ema"))
    def ema(self, decay: float = 0.999) -> EMA:
        """Begin an exponential moving average of the weights, in any stage. All ranks call it, after `prepare`.

        Every step of the optimizer updates it, once in a global batch: the first copies the weights, further ones are
        `average = decay * average + (1 - decay) * weights`. It is part of `save` and `load`; call this before the
        loop over the loader, in a resumed script as well.

        Args:
            decay: How much of the average stays in each update.

        Returns:
            The average: `applied()` lets the model use it, `full_state_dict()` returns it.

        Raises:
            UserError: `decay` is not between 0 and 1 or differs between ranks, or the run is in hybrid mode.

        Example:
            >>> ema = run.ema(decay=0.999)
            >>> with ema.applied():
            ...     results = run.evaluate(model, dataset, metric_fn)
        """
        if not 0 <= decay <= 1:
            raise UserError(f"decay is {decay!r}; give a number from 0 to 1, such as 0.999")
        average = self._make_average("ema", decay)
        average.decay = decay
        return EMA(average, **self._average_context())

    @as_user_call(run_call("run.swa"))
    def swa(self) -> SWA:
        """Begin an equal average of the weights (stochastic weight averaging), in any stage. All ranks call it.

        The weights are added by `update()`, between global batches, such as after each of the last epochs. It is part
        of `save` and `load`.

        Returns:
            The average: `update()` adds the weights, `applied()` lets the model use it, `full_state_dict()` returns it.

        Raises:
            UserError: The run is in hybrid mode.

        Example:
            >>> swa = run.swa()
            >>> swa.update()
        """
        return SWA(self._make_average("swa", None), **self._average_context())

    def _make_average(self, kind: Kind, decay: float | None) -> AveragedWeights:
        loop = self._prepared()
        loop.check_between_batches(f"run.{kind}")
        loop.require_all_ranks(f"run.{kind}")
        loop.checkpoints.averages.check_not_applied(f"run.{kind} was called")
        if self._world.outer:
            raise UserError(
                f'run.{kind} averages the weights of all ranks, and in mode="hybrid" groups have different ones; '
                'use mode="sync"'
            )
        decays = [message["decay"] for message in self._world.exchange.all_gather({"decay": decay})]
        for rank, other in enumerate(decays):
            if other != decays[0]:
                raise UserError(f"decay is {decays[0]} on rank 0 and {other} on rank {rank}; give all ranks the same")
        return loop.checkpoints.averages.make(kind, loop.strategy)

    def _average_context(self) -> dict[str, Any]:
        loop = self._prepared()
        return {
            "registry": loop.checkpoints.averages,
            "model": loop.checkpoints.model,
            "loop": loop,
            "exchange": self._world.exchange,
            "caller": self._world.caller,
        }

    def _folder_of(self, given: str | Path | None) -> str:
        default = self._preemption.folder if self._preemption else DEFAULT_FOLDER
        return str(default if given is None else given)
