"""Which checkpoints of a folder are kept: the newest, or the best by a metric."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.metric import Metric


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
