"""Which checkpoints of a folder are kept: the newest, or the best by a metric.

Those that the script saved are removed only by its own later saves. Automatic ones (periodic, or saved for preemption)
stay while they are among the newest of all.
"""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.metric import Metric

logger = logging.getLogger(__name__)


def list_superseded(checkpoints: Sequence[tuple[Path, bool]], keep: int, *, by_automatic: bool) -> list[Path]:
    """Return which checkpoints a save makes superfluous, the least wanted last.

    Args:
        checkpoints: Those of a folder, the most wanted first, and whether each was saved automatically.
        keep: How many to keep.
        by_automatic: Whether the save is automatic; then what the script saved stays.
    """
    own = [path for path, is_automatic in checkpoints if not is_automatic]
    kept = {path for path, _ in checkpoints[:keep]} | set(own if by_automatic else own[:keep])
    return [path for path, _ in checkpoints if path not in kept]


def prune(folder: Path, keep: int, *, by_automatic: bool, saved: Path | None) -> None:
    """Remove what the checkpoint `saved` makes superfluous; never that one."""
    for path in list_superseded(_list_kinds(folder), keep, by_automatic=by_automatic):
        if path != saved:
            storage.remove_complete(path)


def make_room(folder: Path, keep: int, size: int, *, by_automatic: bool, replaces: Path | None) -> None:
    """Remove before a save what it will make superfluous, as far as the disk has no room for both.

    The newest checkpoint that is whole stays in any case.

    Args:
        folder: Where the checkpoint goes.
        keep: How many checkpoints of the folder to keep.
        size: About how many bytes it will have.
        by_automatic: Whether the save is automatic.
        replaces: The checkpoint whose place it takes, which stays until then.
    """
    if not folder.is_dir():
        return
    checkpoints = [(path, is_automatic) for path, is_automatic in _list_kinds(folder) if path != replaces]
    last_good = next((path for path, _ in checkpoints if storage.is_whole(path)), None)
    for path in reversed(list_superseded(checkpoints, keep - 1, by_automatic=by_automatic)):
        if shutil.disk_usage(folder).free >= size:
            return
        if path != last_good:
            logger.warning("%s is removed before the next checkpoint is written: the disk has no room for both", path)
            storage.remove_complete(path)


def _list_kinds(folder: Path) -> list[tuple[Path, bool]]:
    """Return the checkpoints of a folder, the most wanted first, and whether each was saved automatically."""
    return [(path, _is_automatic(path)) for path in storage.list_checkpoints(folder)]


def _is_automatic(path: Path) -> bool:
    with suppress(WorldError):
        return bool(storage.read_metadata(path).get("automatic"))
    return False


def is_wanted(folder: Path, keep: int, metric: Metric | None, replaces: Path | None = None) -> bool:
    """Return whether a checkpoint with this metric is among the best `keep` of its folder, if it is kept by metric.

    Args:
        folder: Where the checkpoint goes.
        keep: How many checkpoints of the folder to keep.
        metric: Its metric, if it has one.
        replaces: The checkpoint of the folder whose place it takes, which does not count.

    Raises:
        UserError: The checkpoints of the folder are kept in another way.
    """
    saved = list(_read_metrics(folder, replaces))
    for other in saved:
        if (other is None) != (metric is None):
            now, before = ("with", "without") if metric else ("without", "with")
            raise UserError(
                f"{folder} has checkpoints that were saved {before} a metric, and this one is saved {now} one; give it "
                "a folder of its own"
            )
        if other and metric and other.best != metric.best:
            raise UserError(
                f'{folder} keeps checkpoints by best="{other.best}", and this one is saved with best="{metric.best}"; '
                "give it a folder of its own"
            )
    if metric is None:
        return True
    better = sum(other.goodness >= metric.goodness for other in saved if other)
    return not math.isnan(metric.value) and better < keep


def _read_metrics(folder: Path, without: Path | None) -> Iterator[Metric | None]:
    for path in storage.list_checkpoints(folder):
        if path == without:
            continue
        with suppress(WorldError):  # copied only in part, or of another version
            yield Metric.from_metadata(storage.read_metadata(path))
