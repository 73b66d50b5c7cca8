"""Save and load the checkpoints of a run: in the background, complete or not at all.

A save has three parts. This rank's part is copied at once; a thread then writes it; when all ranks have written, rank 0
publishes the checkpoint under its name. The ranks use a process group of their own, so that the collectives of training
keep their order. While a rank writes, they exchange messages every few seconds, so that no disk is too slow for a
timeout and a rank that died is named.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint import load as loading
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.state import (
    Metadata,
    Progress,
    StagedCheckpoint,
    TrainState,
    merge_metadata,
    take_snapshot,
)
from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.rank_exchange import RankExchange, gather_or_raise

DEFAULT_KEEP = 3
"""How many checkpoints of a folder are kept by default."""
_EXCHANGE_EVERY_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveCalls:
    """How often `run.save` was called on a rank, and with which arguments last."""

    count: int = 0
    folder: str = ""
    keep: int = 1


class CheckpointManager:
    """Saves and loads checkpoints of a prepared run, one at a time, on all ranks of a group; `None` for one rank."""

    def __init__(self, group: Group | None, state: TrainState) -> None:
        self._exchange = RankExchange(group)
        self._state, self._rank, self._world_size = state, state.rank, state.world_size
        self._work: Work | None = None
        self._last_saved: tuple[str, int] | None = None
        self.save_calls = SaveCalls()
        self.saved: tuple[storage.CheckpointInfo, ...] = ()
        """The checkpoints in the folder saved to last, newest first; on rank 0 only."""

    def save(self, folder: str, keep: int, progress: Progress, *, wait: bool) -> None:
        """Start a save; raise what failed in the previous one. A second save of the same step does nothing."""
        if keep < 1:
            raise UserError(f"keep is {keep!r}; give the number of checkpoints to keep, at least 1")
        self._start(folder, keep, progress, late=False)
        if wait:
            self.wait()

    def would_wait(self, folder: str, step: int) -> bool:
        """Return whether `save` would wait for a save of the same step that ranks without data have not joined yet."""
        is_saving = self._work is not None and self._last_saved is not None and self._last_saved[1] == step
        return is_saving and self._last_saved != (folder, step)

    def catch_up(self, calls: Sequence[SaveCalls], progress: Callable[[], Progress]) -> None:
        """Join a save that other ranks started while this rank had no data. No step was taken since."""
        latest = max(calls, key=lambda call: call.count)
        if latest.count > self.save_calls.count:
            self._start(latest.folder, latest.keep, progress(), late=True)
            self.save_calls = latest

    def wait(self) -> None:
        """Wait for a save in progress; raise what failed."""
        work, self._work = self._work, None
        if work:
            try:
                work.wait()
            except Exception:
                self._last_saved = None
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

        def read() -> None:
            finish.append(loading.read_state(self._state, metadata, tensors))
            if self._state.outer:
                finish.append(self._state.outer.restore(metadata["outer"], tensors))

        self._gather(read, f"read {path}")
        for apply in finish:
            apply()
        self._last_saved = None
        return metadata["step"], loading.resume_position(metadata, progress)

    def _check(self, metadata: Metadata, progress: Progress) -> None:
        """Refuse a checkpoint that does not fit this run, on all ranks: each sees only its own shards."""

        def check() -> None:
            loading.check_compatible(self._state, metadata)
            loading.resume_position(metadata, progress)

        try:
            self._gather(check, "load the checkpoint")
        except WorldError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise

    def _start(self, folder: str, keep: int, progress: Progress, *, late: bool) -> None:
        self.save_calls = SaveCalls(self.save_calls.count + 1, folder, keep)
        if self._last_saved == (folder, progress.step):
            return
        self.wait()
        staged = take_snapshot(self._state, progress, late=late)
        self._last_saved = (folder, progress.step)
        self._work = Work(partial(self._write, Path(folder).absolute(), keep, staged), lambda: None)
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

    # In the thread that writes

    def _write(self, folder: Path, keep: int, staged: StagedCheckpoint) -> None:
        try:
            unfinished = self._begin(folder, staged.step)
            try:
                self._write_all(unfinished, staged)
                self._publish(unfinished, keep, staged.step)
            except Exception:
                if self._rank == 0:
                    storage.remove(unfinished)
                raise
        except Exception as error:
            # Logged as well as raised: the script may end without another call of `save`.
            if self._rank == 0:
                logger.error(f"the checkpoint of step {staged.step} is not saved: {error}")
            raise

    def _begin(self, folder: Path, step: int) -> Path:
        """Create the directory that all ranks write to."""
        outer = self._state.outer
        owner = f"group-{outer.group}-" if outer else ""

        def create() -> str | None:
            return storage.create_unfinished(folder, step, owner).name if self._rank == 0 else None

        return folder / str(self._gather(create, "begin a checkpoint")[0])

    def _write_all(self, unfinished: Path, staged: StagedCheckpoint) -> None:
        """Write this rank's file, and wait until all ranks have written theirs."""
        work = Work(partial(_write_part, unfinished, self._rank, staged), lambda: None)
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

    def _publish(self, unfinished: Path, keep: int, step: int) -> None:
        """Complete the checkpoint and give it its name, on rank 0; then remove old ones."""

        def publish() -> None:
            if self._rank == 0:
                written = storage.read_written(unfinished, self._world_size)
                storage.publish(unfinished, written, merge_metadata([files.metadata for files in written], step))

        self._gather(publish, "complete the checkpoint")
        if self._rank == 0:
            with suppress(OSError):  # the new checkpoint is complete; the next save tries again to remove old ones
                storage.prune(unfinished.parent, keep)
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


def _write_part(unfinished: Path, rank: int, staged: StagedCheckpoint) -> None:
    outer = staged.outer()
    metadata = staged.metadata | {"outer": dict(outer.metadata)}
    storage.write_part(unfinished, rank, {**staged.parts, **outer.tensors}, metadata)
