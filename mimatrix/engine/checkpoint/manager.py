"""Save and load the checkpoints of a run: in the background, complete or not at all.

A save has three parts. This rank's part is copied at once; a thread then writes it; when all ranks have written, rank 0
publishes the checkpoint under its name (see `writer`).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mimatrix.comm.control.user_calls import UserCall, find_place
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint import load as loading
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.metric import Metric
from mimatrix.engine.checkpoint.save_calls import SaveCalls, check_folder, check_keep
from mimatrix.engine.checkpoint.save_failures import SaveFailures
from mimatrix.engine.checkpoint.state import Metadata, Progress, TrainState, take_snapshot
from mimatrix.engine.checkpoint.tensor_files import TensorReader
from mimatrix.engine.checkpoint.user_state import UserState, copy_user_state, read_user_state
from mimatrix.engine.checkpoint.writer import CheckpointWriter, SaveTask
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.modules.averaged_weights import AverageRegistry
from mimatrix.engine.rank_exchange import RankExchange, gather_or_raise
from mimatrix.engine.user_calls import save_call

DEFAULT_KEEP = 3
"""How many checkpoints of a folder are kept by default."""
DEFAULT_FOLDER = "checkpoints"
DEFAULT_MAX_FAILED_SAVES = 3
"""After how many failed saves in a row training stops, by default."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What was saved last; it is saved again only for another metric, or with a user state."""

    folder: Path
    step: int
    metric: Metric | None


@dataclass(frozen=True, slots=True)
class _Home:
    """Where automatic checkpoints go: where the script saves, or loads from if it has not saved yet."""

    folder: str
    keep: int = DEFAULT_KEEP


class CheckpointManager:
    """Saves and loads checkpoints of a prepared run, one at a time, on all ranks of a group; `None` for one rank."""

    def __init__(
        self,
        group: Group | None,
        state: TrainState,
        *,
        folder: str = DEFAULT_FOLDER,
        max_failed_saves: int = DEFAULT_MAX_FAILED_SAVES,
    ) -> None:
        self._group, self._exchange = group, RankExchange(group)
        self._state, self._rank, self._world_size = state, state.rank, state.world_size
        outer = state.outer.group if state.outer else None
        self._writer = CheckpointWriter(self._exchange, state.rank, state.world_size, outer)
        self._failures = SaveFailures(max_failed_saves, state.rank)
        self._work: Work | None = None
        self._last_saved: _Saved | None = None
        self._home = _Home(folder)
        self._has_saved = False
        """Whether the script has said by a save where checkpoints go."""
        self._user_state = UserState()
        self.get_user_state: Callable[[], object] | None = None
        """Gives the state of the script for a save that is not given one."""
        self.save_calls = SaveCalls()

    @property
    def model(self) -> nn.Module:
        """The prepared model."""
        return self._state.model

    @property
    def averages(self) -> AverageRegistry:
        """The averages of the weights, which belong to a checkpoint."""
        return self._state.averages

    @property
    def user_state(self) -> dict[Any, Any]:
        """What this rank gave the last save, or what was loaded since."""
        return self._user_state.value

    @property
    def saved(self) -> tuple[storage.CheckpointInfo, ...]:
        """The checkpoints in the folder saved to last, newest or best first; on rank 0 only."""
        return self._writer.saved

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._work is not None and not self._work.is_done()

    def save(
        self,
        folder: str,
        keep: int,
        progress: Progress,
        *,
        wait: bool,
        user_state: object = None,
        metric: Metric | None = None,
    ) -> None:
        """Start a save; raise what failed in the previous ones, if training is not to continue after that.

        A second save of the same step and folder replaces the first one if it has a user state or another metric, or
        the first one was automatic, and otherwise does nothing.

        Args:
            folder: Where the checkpoint goes.
            keep: How many checkpoints of the folder to keep.
            progress: Where the run is.
            wait: Return only when the checkpoint is complete.
            user_state: What the script wants back; None: what `get_user_state` returns, what it gave last, or loaded.
            metric: Keep the best checkpoints by it, not the newest.
        """
        calls = SaveCalls(count=self.save_calls.count + 1, folder=folder, keep=check_keep(keep))
        check_folder(folder)
        if metric:
            calls = replace(calls, metric=metric.value, best=metric.best)
        self._take_user_state(user_state, calls, progress)
        self._start(calls, progress, late=False, waits=wait)
        if wait:
            self.wait()

    def save_automatically(self, progress: Progress, folder: str | None = None) -> bool:
        """Start a save that the script did not ask for, unless it has saved this step.

        Args:
            progress: Where the run is.
            folder: Where the checkpoint goes; by default where the script saves.

        Returns:
            False if this has to wait until ranks without data have joined a save in progress.
        """
        home = self._home if folder is None else _Home(folder)
        saved = _Saved(Path(home.folder).absolute(), progress.step, None)
        if saved == self._last_saved:
            return True
        if self.would_wait(home.folder, progress.step):
            return False
        number = self.save_calls.count + 1
        calls = SaveCalls(count=number, folder=home.folder, keep=home.keep, automatic=True)
        self._take_user_state(None, calls, progress)
        self._start(calls, progress, late=False)
        return True

    def would_wait(self, folder: str, step: int, *, has_user_state: bool = False, metric: Metric | None = None) -> bool:
        """Return whether `save` would wait for a save of the same step that ranks without data have not joined yet."""
        if self._work is None or self._last_saved is None or self._last_saved.step != step:
            return False
        is_new = has_user_state or self.save_calls.automatic
        return is_new or self._last_saved != _Saved(Path(folder).absolute(), step, metric)

    def catch_up(self, calls: Sequence[SaveCalls], progress: Callable[[], Progress]) -> None:
        """Join a save that other ranks started while this rank had no data. No step was taken since."""
        latest = max(calls, key=lambda call: call.count)
        if latest.count > self.save_calls.count:
            self._start(latest, progress(), late=True)

    def wait(self) -> None:
        """Wait for a save in progress; raise what failed in the last one."""
        self._settle()
        self._failures.raise_last()

    def load(self, folder: str, progress: Progress) -> tuple[int, DataPosition] | None:
        """Load the newest checkpoint of a folder; return the step and position to resume from. A collective."""
        self._settle()
        checkpoint = self._find(folder)
        if checkpoint is None:
            self._settle_in(folder)
            return None
        path, metadata = checkpoint
        self._check(metadata, progress)
        finish: list[Callable[[], None]] = []
        user_state: dict[Any, Any] = {}

        def read() -> None:
            # What can be refused comes first: nothing has changed then.
            tensors = TensorReader(path, metadata)
            user_state.update(read_user_state(metadata["user_state"], tensors))
            finish.append(loading.read_state(self._state, metadata, tensors))
            if self._state.outer:
                finish.append(self._state.outer.restore(metadata["outer"], tensors))

        self._gather(read, f"read {path}")
        for apply in finish:
            apply()
        self._last_saved = None
        self._user_state = UserState(user_state, self.save_calls.count)
        if path != Path(folder) and "metric" not in metadata:
            self._settle_in(folder)
        return metadata["step"], loading.resume_position(metadata, progress, self._state)

    def _settle_in(self, folder: str) -> None:
        """Let automatic checkpoints go to the folder that the script loads from, until it saves."""
        if not self._has_saved:
            self._home = _Home(folder, self._home.keep)

    def _check(self, metadata: Metadata, progress: Progress) -> None:
        """Refuse a checkpoint that does not fit this run, on all ranks: each sees only its own shards."""

        def check() -> None:
            loading.check_compatible(self._state, metadata)
            loading.resume_position(metadata, progress, self._state)

        try:
            self._gather(check, "load the checkpoint")
        except WorldError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise

    def _take_user_state(self, given: object, calls: SaveCalls, progress: Progress) -> None:
        """Take the state of the script for a save that will be written."""
        saved = _Saved(Path(calls.folder).absolute(), progress.step, calls.to_metric())
        if given is None and self.get_user_state and (saved != self._last_saved or self.save_calls.automatic):
            given = self.get_user_state()
        if given is not None:
            self._user_state = UserState(copy_user_state(given), calls.count)

    def _start(self, calls: SaveCalls, progress: Progress, *, late: bool, waits: bool = False) -> None:
        was_automatic, self.save_calls = self.save_calls.automatic, calls
        folder = Path(calls.folder).absolute()  # now: the script may change its directory meanwhile
        if not calls.automatic and calls.metric is None:
            self._home, self._has_saved = _Home(calls.folder, calls.keep), True
        saved, last = _Saved(folder, progress.step, calls.to_metric()), self._last_saved
        if saved == last and self._user_state.given_at < calls.count and not was_automatic:
            return
        self._settle()
        is_same = last is not None and (last.folder, last.step) == (saved.folder, saved.step)
        task = SaveTask(
            folder=folder,
            calls=calls,
            staged=take_snapshot(self._state, progress, late=late),
            user_state=self._user_state,
            replaces=self._writer.published if is_same else None,
            late=late,
        )
        self._last_saved, self._writer.published = saved, task.replaces
        # A thread of the program may fail alone; the main one ends the process.
        may_end_process = threading.current_thread() is threading.main_thread()
        call = self._save_call(progress.step)
        write = partial(self._write, call, task, waits=waits, may_end_process=may_end_process)
        self._work = Work(write, self._watch)
        # Not a daemon: Python waits for it before it exits.
        threading.Thread(target=self._work.run, name="mimatrix-save").start()

    def _settle(self) -> None:
        """Wait for a save in progress; raise a failure after which training is not to continue."""
        work, self._work = self._work, None
        if work:
            try:
                work.wait()
            except Exception as error:
                self._last_saved = None
                if error is not work.error:  # the waiting has failed, not the save
                    raise
        self._failures.raise_final()

    def _find(self, folder: str) -> tuple[Path, Metadata] | None:
        """Return the newest intact checkpoint in a folder, or the one that the path names."""
        root = Path(folder)
        names = ["."] if storage.is_checkpoint(root) else [path.name for path in storage.list_checkpoints(root)]
        # Rank 0 decides: another group may save or remove checkpoints meanwhile.
        candidates = [root / name for name in self._exchange.all_gather({"names": names})[0]["names"]]
        reasons: list[str] = []
        for path in candidates:
            metadata = self._verify(path, reasons)
            if metadata:
                self._log_skipped(reasons, path)
                return path, metadata
        if reasons:
            raise UserError(
                f"no checkpoint in {folder} can be read: {reasons[0]}; give another folder, or remove it to start over"
            )
        return None

    def _save_call(self, step: int) -> UserCall:
        current = self._group.caller.current if self._group else None
        return save_call(step, current.place if current else find_place())

    def _watch(self) -> None:
        """Say that the user's thread waits for a save, and raise if another rank cannot come to it."""
        if self._group:
            self._group.queue.watch("a save")

    def _write(self, call: UserCall, task: SaveTask, *, waits: bool, may_end_process: bool) -> None:
        """Write a checkpoint, in the thread for that."""
        with self._group.caller.in_background(call, self._group.name) if self._group else nullcontext():
            try:
                self._writer.write(task)
            except Exception as error:  # noqa: BLE001 (told here, and raised on the thread that waits)
                raised = self._failures.note_failure(
                    error, task.staged.step, call.place, is_raised=waits, may_end_process=may_end_process
                )
                raise raised from raised.__cause__
            self._failures.note_success()

    # Among ranks

    def _gather(self, task: Callable[[], Any], action: str) -> list[Any]:
        return gather_or_raise(self._exchange, task, action=action)

    def _verify(self, path: Path, reasons: list[str]) -> Metadata | None:
        """Return the metadata of a checkpoint if all ranks find it intact; otherwise None, and add the reason."""
        metadata: Metadata = {}

        def verify() -> None:
            metadata.update(storage.read_metadata(path))
            storage.verify(path, metadata, self._rank, self._world_size)

        try:
            self._gather(verify, f"read {path.name}")
        except WorldError as error:
            reasons.append(str(error))
            return None
        return metadata

    def _log_skipped(self, reasons: Sequence[str], used: Path) -> None:
        for reason in reasons if self._rank == 0 else ():
            logger.warning(f"{reason}; using the next older checkpoint, {used}")
