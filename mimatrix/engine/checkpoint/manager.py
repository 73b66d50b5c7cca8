"""Save and load the checkpoints of a run: in the background, complete or not at all.

A save has three parts. This rank's part is copied at once; a thread then writes it; when all ranks have written, rank 0
publishes the checkpoint under its name. The ranks use a process group of their own, so that the collectives of training
keep their order. While a rank writes, they exchange messages every few seconds, so that no disk is too slow for a
timeout and a rank that died is named.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mimatrix.comm.control.user_calls import UserCall, find_place
from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.core.errors import SaveError, UserError, WorldError
from mimatrix.core.exit_codes import BAD_INPUT, FAILED
from mimatrix.engine.checkpoint import load as loading
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.failed_exit import FailedExit
from mimatrix.engine.checkpoint.metric import Metric
from mimatrix.engine.checkpoint.retention import is_wanted
from mimatrix.engine.checkpoint.save_calls import (
    SaveArguments,
    SaveCalls,
    check_folder,
    check_keep,
    check_same_arguments,
)
from mimatrix.engine.checkpoint.state import (
    Metadata,
    Progress,
    StagedCheckpoint,
    TrainState,
    merge_metadata,
    take_snapshot,
)
from mimatrix.engine.checkpoint.user_state import UserState, copy_user_state, read_user_state
from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.modules.averaged_weights import AverageRegistry
from mimatrix.engine.rank_exchange import RankExchange, gather_or_raise
from mimatrix.engine.user_calls import save_call

DEFAULT_KEEP = 3
"""How many checkpoints of a folder are kept by default."""
_EXCHANGE_EVERY_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What was saved last; it is saved again only for another metric, or with a user state."""

    folder: Path
    step: int
    metric: Metric | None


class CheckpointManager:
    """Saves and loads checkpoints of a prepared run, one at a time, on all ranks of a group; `None` for one rank."""

    def __init__(self, group: Group | None, state: TrainState) -> None:
        self._group, self._exchange = group, RankExchange(group)
        self._state, self._rank, self._world_size = state, state.rank, state.world_size
        self._work: Work | None = None
        self._last_saved: _Saved | None = None
        self._published: Path | None = None
        """The checkpoint of the last save, once it is written; on rank 0 only."""
        self._exit = FailedExit()
        self._user_state = UserState()
        self.save_calls = SaveCalls()
        self.saved: tuple[storage.CheckpointInfo, ...] = ()
        """The checkpoints in the folder saved to last, newest or best first; on rank 0 only."""

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
        """Start a save; raise what failed in the previous one.

        A second save of the same step and folder replaces the first one if it has a user state or another metric, and
        otherwise does nothing.

        Args:
            folder: Where the checkpoint goes.
            keep: How many checkpoints of the folder to keep.
            progress: Where the run is.
            wait: Return only when the checkpoint is complete.
            user_state: What the script wants back; None: what it gave last, or loaded.
            metric: Keep the best checkpoints by it, not the newest.
        """
        number = self.save_calls.count + 1
        calls = SaveCalls(count=number, folder=folder, keep=check_keep(keep))
        check_folder(folder)
        if user_state is not None:
            self._user_state = UserState(copy_user_state(user_state), number)
        if metric:
            calls = replace(calls, metric=metric.value, best=metric.best)
        self._start(calls, progress, late=False)
        if wait:
            self.wait()

    def would_wait(self, folder: str, step: int, *, has_user_state: bool = False, metric: Metric | None = None) -> bool:
        """Return whether `save` would wait for a save of the same step that ranks without data have not joined yet."""
        if self._work is None or self._last_saved is None or self._last_saved.step != step:
            return False
        return has_user_state or self._last_saved != _Saved(Path(folder).absolute(), step, metric)

    def catch_up(self, calls: Sequence[SaveCalls], progress: Callable[[], Progress]) -> None:
        """Join a save that other ranks started while this rank had no data. No step was taken since."""
        latest = max(calls, key=lambda call: call.count)
        if latest.count > self.save_calls.count:
            self._start(latest, progress(), late=True)

    def wait(self) -> None:
        """Wait for a save in progress; raise what failed."""
        work, self._work = self._work, None
        if work:
            try:
                work.wait()
            except Exception:
                self._last_saved = None
                self._exit.cancel()
                raise

    def load(self, folder: str, progress: Progress) -> tuple[int, DataPosition] | None:
        """Load the newest checkpoint of a folder; return the step and position to resume from. A collective."""
        self.wait()
        checkpoint = self._find(folder)
        if checkpoint is None:
            return None
        path, metadata = checkpoint
        self._check(metadata, progress)
        finish: list[Callable[[], None]] = []
        tensors = storage.TensorReader(path)
        user_state: dict[Any, Any] = {}

        def read() -> None:
            finish.append(loading.read_state(self._state, metadata, tensors))
            user_state.update(read_user_state(metadata["user_state"], tensors))
            if self._state.outer:
                finish.append(self._state.outer.restore(metadata["outer"], tensors))

        self._gather(read, f"read {path}")
        for apply in finish:
            apply()
        self._last_saved = None
        self._user_state = UserState(user_state, self.save_calls.count)
        return metadata["step"], loading.resume_position(metadata, progress, self._state)

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

    def _start(self, calls: SaveCalls, progress: Progress, *, late: bool) -> None:
        self.save_calls = calls
        folder = Path(calls.folder).absolute()  # now: the script may change its directory meanwhile
        saved, last = _Saved(folder, progress.step, calls.to_metric()), self._last_saved
        if saved == last and self._user_state.given_at < calls.count:
            return
        self.wait()
        replaces = self._published if last and (last.folder, last.step) == (saved.folder, saved.step) else None
        staged = take_snapshot(self._state, progress, late=late)
        self._last_saved, self._published = saved, replaces
        # A thread of the program may fail alone; the main one ends the process.
        may_end_process = threading.current_thread() is threading.main_thread()
        call = self._save_call(progress.step)
        task = partial(
            self._write_in_background,
            call,
            folder,
            calls,
            staged,
            self._user_state,
            replaces=replaces,
            late=late,
            place=call.place,
            may_end_process=may_end_process,
        )
        self._work = Work(task, self._watch)
        # Not a daemon: Python waits for it before it exits.
        threading.Thread(target=self._work.run, name="mimatrix-save").start()

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
            self._group.watch("a save")

    # In the thread that writes

    def _write_in_background(self, call: UserCall, *arguments: Any, **options: Any) -> None:
        with self._group.caller.in_background(call, self._group.name) if self._group else nullcontext():
            self._write(*arguments, **options)

    def _write(
        self,
        folder: Path,
        calls: SaveCalls,
        staged: StagedCheckpoint,
        user_state: UserState,
        *,
        replaces: Path | None,
        late: bool,
        place: str,
        may_end_process: bool,
    ) -> None:
        try:
            own = SaveArguments.of(calls, user_state, late=late)
            unfinished, has_newest = self._begin(folder, own, staged.step, replaces)
            if unfinished is None:
                self._log_not_best(calls, staged.step)
                return
            try:
                self._write_all(unfinished, staged, user_state if has_newest else None)
                self._publish(unfinished, calls, staged.step, replaces)
            except Exception:
                if self._rank == 0:
                    storage.remove(unfinished)
                raise
        except Exception as error:
            # Logged as well as raised: the script may not come to another call of `save` for long, or at all.
            sentence = f"the checkpoint of step {staged.step} is not saved: {error}"
            if self._rank == 0:
                logger.error(sentence)
            if may_end_process:
                told = sentence if place in sentence else f"{sentence} ({place})"
                self._exit.demand(told, BAD_INPUT if isinstance(error, UserError) else FAILED)
            if type(error) is WorldError:
                raise SaveError(sentence) from error
            raise

    def _begin(self, folder: Path, own: SaveArguments, step: int, replaces: Path | None) -> tuple[Path | None, bool]:
        """Create the directory that all ranks write to, if the checkpoint is wanted.

        Returns:
            The directory, or None; and whether this rank is the one that has the newest state of the user.
        """
        outer = self._state.outer
        owner = f"group-{outer.group}-" if outer else ""

        def create() -> list[Any]:
            name = None
            if self._rank == 0 and is_wanted(folder, own.calls.keep, own.calls.to_metric(), replaces):
                name = storage.create_unfinished(folder, step, owner).name
            return [name, own.to_json()]

        names, messages = zip(*self._gather(create, "begin a checkpoint"), strict=True)
        unfinished = None if names[0] is None else folder / names[0]
        arguments = [SaveArguments.from_json(message) for message in messages]
        try:
            check_same_arguments(arguments)
        except UserError:
            if unfinished and self._rank == 0:
                storage.remove(unfinished)
            raise
        given_at = [each.given_at for each in arguments]
        return unfinished, given_at.index(max(given_at)) == self._rank

    def _log_not_best(self, calls: SaveCalls, step: int) -> None:
        if self._rank == 0:
            logger.info(
                f"step {step} is not saved to {calls.folder}: its metric {calls.metric} is not among the best "
                f"{calls.keep}"
            )

    def _write_all(self, unfinished: Path, staged: StagedCheckpoint, user_state: UserState | None) -> None:
        """Write this rank's file, and wait until all ranks have written theirs."""
        work = Work(partial(_write_part, unfinished, self._rank, staged, user_state), lambda: None)
        thread = threading.Thread(target=work.run, name="mimatrix-write")
        thread.start()

        def poll() -> bool:
            is_done = work.is_done()  # before the error, which would be missed if it came in between
            if work.error:
                raise work.error
            return is_done

        while True:
            thread.join(_EXCHANGE_EVERY_S)
            if all(self._gather(poll, "write its part")):
                return

    def _publish(self, unfinished: Path, calls: SaveCalls, step: int, replaces: Path | None) -> None:
        """Complete the checkpoint and give it its name, on rank 0; then remove the one it replaces and old ones."""

        def publish() -> None:
            if self._rank == 0:
                written = storage.read_written(unfinished, self._world_size)
                metadata = merge_metadata([files.metadata for files in written], step)
                metric = calls.to_metric()
                by_metric = {"metric": metric.to_json()} if metric else {}
                self._published = storage.publish(unfinished, written, metadata | by_metric)

        self._gather(publish, "complete the checkpoint")
        if self._rank == 0:
            with suppress(OSError):  # the new checkpoint is complete; the next save tries again to remove old ones
                if replaces and self._published:
                    self._published = storage.replace(replaces, self._published)
                storage.prune(unfinished.parent, calls.keep)
                self.saved = storage.describe_checkpoints(unfinished.parent)

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


def _write_part(unfinished: Path, rank: int, staged: StagedCheckpoint, user_state: UserState | None) -> None:
    outer = staged.outer()
    metadata = staged.metadata | {"outer": dict(outer.metadata)}
    parts = {**staged.parts, **outer.tensors}
    if user_state:
        metadata["user_state"], tensors = user_state.stage()
        parts |= tensors
    storage.write_part(unfinished, rank, parts, metadata)
