"""Write one checkpoint, on a thread of its own: begin, write this rank's part, and publish when all have written.

The ranks use a process group of their own, so that the collectives of training keep their order. While a rank writes,
they exchange messages every few seconds, so that no disk is too slow for a timeout and a rank that died is named.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mimatrix.comm.work import Work
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.retention import is_wanted, make_room, prune
from mimatrix.engine.checkpoint.save_calls import SaveArguments, SaveCalls, check_same_arguments
from mimatrix.engine.checkpoint.state import StagedCheckpoint, merge_metadata
from mimatrix.engine.checkpoint.user_state import UserState
from mimatrix.engine.rank_exchange import RankExchange, gather_or_raise

_EXCHANGE_EVERY_S = 5.0
_BYTES_PER_TENSOR, _OTHER_BYTES = 4096, 1 << 16
"""What a checkpoint needs besides the elements of its tensors, roughly."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTask:
    """One save, as one rank begins it."""

    folder: Path
    calls: SaveCalls
    staged: StagedCheckpoint
    user_state: UserState
    replaces: Path | None
    """The checkpoint of the same step whose place it takes; known to rank 0."""
    late: bool
    """Whether this rank had no data and follows the others."""

    def count_bytes(self) -> int:
        """Return about how many bytes this rank writes."""
        parts = self.staged.parts.values()
        return sum(part.value.nbytes + _BYTES_PER_TENSOR for part in parts) + _OTHER_BYTES


class CheckpointWriter:
    """Writes checkpoints together with the other ranks."""

    def __init__(self, exchange: RankExchange, rank: int, world_size: int, group: int | None) -> None:
        self._exchange, self._rank, self._world_size = exchange, rank, world_size
        self._owner = "" if group is None else f"group-{group}-"
        """Whose unfinished checkpoints these are, if several groups save to a folder."""
        self.published: Path | None = None
        """The checkpoint of the last save, once it is written; on rank 0 only."""
        self.saved: tuple[storage.CheckpointInfo, ...] = ()
        """The checkpoints in the folder saved to last, newest or best first; on rank 0 only."""

    def write(self, task: SaveTask) -> None:
        """Write a checkpoint, if it is wanted. A collective."""
        unfinished, has_newest = self._begin(task)
        if unfinished is None:
            self._log_not_best(task.calls, task.staged.step)
            return
        try:
            self._write_all(unfinished, task.staged, task.user_state if has_newest else None)
            self._publish(unfinished, task)
        except Exception:
            if self._rank == 0:
                storage.remove(unfinished)
            raise

    def _begin(self, task: SaveTask) -> tuple[Path | None, bool]:
        """Create the directory that all ranks write to, if the checkpoint is wanted.

        Returns:
            The directory, or None; and whether this rank is the one that has the newest state of the user.
        """
        own = SaveArguments.of(task.calls, task.user_state, late=task.late)
        messages = self._gather(lambda: [own.to_json(), task.count_bytes()], "begin a checkpoint")
        arguments = [SaveArguments.from_json(message) for message, _ in messages]
        check_same_arguments(arguments)

        def create() -> str | None:
            if self._rank or not is_wanted(task.folder, task.calls.keep, task.calls.to_metric(), task.replaces):
                return None
            return self._create(task, sum(size for _, size in messages)).name

        name = self._gather(create, "begin a checkpoint")[0]
        given_at = [each.given_at for each in arguments]
        return None if name is None else task.folder / name, given_at.index(max(given_at)) == self._rank

    def _create(self, task: SaveTask, size: int) -> Path:
        """Create the directory, and make room for what will be in it."""
        unfinished = storage.create_unfinished(task.folder, task.staged.step, self._owner)
        automatic = task.calls.automatic
        make_room(task.folder, task.calls.keep, size, by_automatic=automatic, replaces=task.replaces)
        return unfinished

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

    def _publish(self, unfinished: Path, task: SaveTask) -> None:
        """Complete the checkpoint and give it its name, on rank 0; then remove the one it replaces and old ones."""
        calls = task.calls

        def publish() -> None:
            if self._rank == 0:
                written = storage.read_written(unfinished, self._world_size)
                metadata = merge_metadata([files.metadata for files in written], task.staged.step)
                metric = calls.to_metric()
                kept_by = {"metric": metric.to_json()} if metric else {}
                self.published = storage.publish(
                    unfinished, written, {**metadata, **kept_by, "automatic": calls.automatic}
                )

        self._gather(publish, "complete the checkpoint")
        if self._rank == 0:
            with suppress(OSError):  # the new checkpoint is complete; the next save tries again to remove old ones
                if task.replaces and self.published:
                    self.published = storage.replace(task.replaces, self.published)
                prune(task.folder, calls.keep, by_automatic=calls.automatic, saved=self.published)
                self.saved = storage.describe_checkpoints(task.folder)

    def _gather(self, task: Callable[[], Any], action: str) -> list[Any]:
        return gather_or_raise(self._exchange, task, action=action)


def _write_part(unfinished: Path, rank: int, staged: StagedCheckpoint, user_state: UserState | None) -> None:
    outer = staged.outer()
    metadata = staged.metadata | {"outer": dict(outer.metadata)}
    parts = {**staged.parts, **outer.tensors}
    if user_state:
        metadata["user_state"], tensors = user_state.stage()
        parts |= tensors
    storage.write_part(unfinished, rank, parts, metadata)
