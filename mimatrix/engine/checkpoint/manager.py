"""Checkpoints of a run: saved beside training, complete or not there at all, and found again.

A save has three parts. What this rank has is copied at once; a thread then writes it; when all ranks have written,
rank 0 gives the whole its name. The ranks meet over a group of their own, so that training's collectives keep their
order, and they meet again and again while a rank writes, so that no disk is too slow and a rank that died is named.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mimatrix.comm.group import Group
from mimatrix.comm.work import Work
from mimatrix.core.errors import MiMatrixError, UserError, WorldError
from mimatrix.engine.checkpoint import load as restoring
from mimatrix.engine.checkpoint import storage as disk
from mimatrix.engine.checkpoint.state import Metadata, Progress, StagedCheckpoint, TrainState, merged, staged
from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.rank_exchange import RankExchange

KEPT = 3
"""Checkpoints of a folder that stay, if nothing else is said."""
_MEETS_EVERY_S = 5.0


class CheckpointManager:
    """Saves and loads checkpoints of a prepared run, one at a time, on all ranks of a group; alone without one."""

    def __init__(self, group: Group | None, subject: TrainState, standing: Callable[[], Progress]) -> None:
        self._exchange = RankExchange(group)
        self._subject, self._standing = subject, standing
        self._rank, self._ranks = subject.rank, subject.ranks
        self._work: Work | None = None
        self._saved: tuple[str, int] | None = None
        self.said: tuple[int, str, int] = (0, "", 1)
        """How often `save` was called on this rank, and with what folder and `keep` last."""
        self.kept: tuple[disk.CheckpointInfo, ...] = ()
        """On rank 0, the newest first."""

    def save(self, folder: str, keep: int, *, wait: bool) -> None:
        """Begin to save; what went wrong in the save before is raised here. A second one of a step is the first."""
        if keep < 1:
            raise UserError(f"keep is {keep!r}; give the number of checkpoints that stay, at least 1")
        self._start(folder, keep, late=False)
        if wait:
            self.settle()

    def would_wait(self, folder: str) -> bool:
        """Whether `save` would wait for another one of the same step, which ranks without data have not joined yet."""
        step = self._standing().step
        saving = self._work is not None and self._saved is not None and self._saved[1] == step
        return saving and self._saved != (folder, step)

    def catch_up(self, said: Sequence[list[Any] | tuple[int, str, int]]) -> None:
        """A rank without data did not come by: join in what others save. Nothing has been stepped since they did."""
        calls, folder, keep = max(said, key=lambda each: int(each[0]))
        if calls > self.said[0]:
            self._start(folder, keep, late=True)
            self.said = (calls, folder, keep)

    def settle(self) -> None:
        """Back when nothing is being saved; raises what went wrong."""
        work, self._work = self._work, None
        if work:
            try:
                work.wait()
            except Exception:
                self._saved = None
                raise

    def load(self, folder: str) -> tuple[int, DataPosition] | None:
        """Take over the newest checkpoint of a folder: the step and position at which the run goes on. A collective."""
        self.settle()
        found = self._find(folder)
        if found is None:
            return None
        path, facts = found
        self._check(facts)
        finish: list[Callable[[], None]] = []
        tensors = disk.TensorReader(path)

        def read() -> None:
            finish.append(restoring.read_into(self._subject, facts, tensors))
            if self._subject.outer:
                finish.append(self._subject.outer.restore(facts["outer"], tensors))

        error = _error_of(read)
        self._agree(error, f"read {path}")
        for each in finish:
            each()
        self._saved = None
        return facts["step"], restoring.position_in(facts, self._standing())

    def _check(self, facts: Metadata) -> None:
        """Refuse what does not fit this run, on all ranks: each sees only its own slices."""

        def fits() -> None:
            restoring.check(self._subject, facts)
            restoring.position_in(facts, self._standing())

        error = _error_of(fits)
        try:
            self._agree(error, "load the checkpoint")
        except WorldError:
            if isinstance(error, UserError):
                raise error from None
            raise

    def _start(self, folder: str, keep: int, *, late: bool) -> None:
        standing = self._standing()
        self.said = (self.said[0] + 1, folder, keep)
        if self._saved == (folder, standing.step):
            return
        self.settle()
        copied = staged(self._subject, standing, late=late)
        self._saved = (folder, standing.step)
        self._work = Work(partial(self._write, Path(folder).absolute(), keep, copied), lambda: None)
        # Not a daemon: Python waits for it before it ends.
        threading.Thread(target=self._work.run, name="mimatrix-save").start()

    def _find(self, folder: str) -> tuple[Path, Metadata] | None:
        """The newest checkpoint in a folder that is whole, or the one that the path names."""
        asked = Path(folder)
        mine = ["."] if disk.is_checkpoint(asked) else [path.name for path in disk.checkpoints_in(asked)]
        candidates = [asked / name for name in self._exchange.all({"names": mine})[0]["names"]]
        reasons: list[str] = []
        for path in candidates:
            found = self._verified(path, reasons)
            if found:
                self._say_skipped(reasons, path)
                return path, found
        if reasons:
            raise UserError(
                f"no checkpoint in {folder} can be read: {reasons[0]}; give another folder, or remove it to start anew"
            )
        return None

    # In the thread that writes

    def _write(self, folder: Path, keep: int, staged: StagedCheckpoint) -> None:
        try:
            place = self._begun(folder, staged.step)
            try:
                self._written(place, staged)
                self._published(place, keep, staged.step)
            except Exception:
                if self._rank == 0:
                    disk.remove(place)
                raise
        except Exception as error:
            # Nobody may ever ask: the script may be at its end.
            if self._rank == 0:
                sys.stderr.write(f"mimatrix: the checkpoint of step {staged.step} is not saved: {error}\n")
            raise

    def _begun(self, folder: Path, step: int) -> Path:
        """Where all ranks write to."""
        made: list[Path] = []
        outer = self._subject.outer
        whose = f"group-{outer.group}-" if outer else ""
        error = _error_of(lambda: made.append(disk.begin(folder, step, whose))) if self._rank == 0 else None
        messages = self._agree(error, "begin a checkpoint", name=made[0].name if made else "")
        return folder / str(messages[0]["name"])

    def _written(self, place: Path, staged: StagedCheckpoint) -> None:
        """Write this rank's file, and wait for the others'."""
        work = Work(partial(_write_part, place, self._rank, staged), lambda: None)
        thread = threading.Thread(target=work.run, name="mimatrix-write")
        thread.start()
        while True:
            thread.join(_MEETS_EVERY_S)
            messages = self._agree(work.error, "write its part", done=work.is_done())
            if all(message["done"] for message in messages):
                return

    def _published(self, place: Path, keep: int, step: int) -> None:
        def publish() -> None:
            written = disk.read_notes(place, self._ranks)
            disk.publish(place, written, merged([each.facts for each in written], step))

        error = _error_of(publish) if self._rank == 0 else None
        self._agree(error, "complete the checkpoint")
        if self._rank == 0:
            with suppress(OSError):  # the new one is there; the next save tries again
                disk.prune(place.parent, keep)
                self.kept = disk.listed(place.parent)

    # Inside

    def _agree(self, error: Exception | None, what: str, **said: object) -> list[Metadata]:
        """What all ranks say, if none has failed."""
        text = (
            f"{type(error).__name__}: {error}" if error and not isinstance(error, MiMatrixError) else str(error or "")
        )
        messages = self._exchange.all({"error": text, **said})
        for rank, message in enumerate(messages):
            if message["error"]:
                raise WorldError(f"rank {rank} could not {what}: {message['error']}") from error
        return messages

    def _verified(self, path: Path, reasons: list[str]) -> Metadata | None:
        """The facts of a checkpoint, if all ranks find it whole; otherwise another reason."""
        found: list[Metadata] = []

        def look() -> None:
            found.append(disk.read_facts(path))
            disk.verify(path, found[0], self._rank, self._ranks)

        error = _error_of(look)
        try:
            self._agree(error, f"read {path.name}")
        except WorldError as error:
            reasons.append(str(error))
            return None
        return found[0]

    def _say_skipped(self, reasons: Sequence[str], taken: Path) -> None:
        for reason in reasons if self._rank == 0 else ():
            sys.stderr.write(f"mimatrix: {reason}; the next older one is taken, {taken}\n")


def _write_part(place: Path, rank: int, staged: StagedCheckpoint) -> None:
    outside = staged.outside()
    facts = staged.facts | {"outer": dict(outside.facts)}
    disk.write_part(place, rank, {**staged.parts, **outside.parts}, facts)


def _error_of(task: Callable[[], object]) -> Exception | None:
    try:
        task()
    except Exception as error:  # noqa: BLE001 (raised on every rank once all know)
        return error
    return None
