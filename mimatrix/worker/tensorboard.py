"""Metrics of a job for TensorBoard: what `run.log` was given, and the speed."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from mimatrix.worker.bounds import as_float

logger = logging.getLogger(__name__)
T = TypeVar("T")
FOLDER = "tensorboard"
_FLUSH_S = 10
_MAX_POINTS = 10
"""Points of a curve per report: TensorBoard draws a thousand of it in the end, and each takes time from a step."""


class TensorBoardWriter:
    """Writes event files into a directory below a job's checkpoints; does nothing if TensorBoard is not installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._writer: Any = None
        self._step = -1
        self._is_over = False
        """Whether it is closed, or cannot be opened."""

    def write(self, entries: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Write what was logged, as (step, values); of a long curve some points."""
        for name, curve in _curves_by_name(entries).items():
            for step, value in _thin_out(curve):
                self._add(name, value, step)

    def write_speeds(self, step: int, speeds: Mapping[str, float]) -> None:
        """Write the current speed, if there were steps since the last call and something was logged."""
        if self._writer is not None and step > self._step:
            for name, value in speeds.items():
                self._add(f"speed/{name}", value, step)
        self._step = step

    def close(self) -> None:
        """Flush and close the event file for good."""
        writer, self._writer, self._is_over = self._writer, None, True
        if writer is not None:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001 (a full disk, or whatever TensorBoard makes of it)
                self._tell(error)

    def _add(self, name: str, value: float, step: int) -> None:
        if self._writer is None and not self._is_over:
            self._open()
        if self._writer is not None:
            try:
                self._writer.add_scalar(name, as_float(value), step)
            except Exception as error:  # noqa: BLE001 (a full disk, or whatever TensorBoard makes of it)
                self._tell(error)
                self._abandon()

    def _open(self) -> None:
        try:
            module = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(str(self._folder), flush_secs=_FLUSH_S)
        except (ImportError, OSError):  # not installed, or the directory is not writable: training continues without
            self._is_over = True

    def _abandon(self) -> None:
        writer, self._writer, self._is_over = self._writer, None, True
        with suppress(Exception):  # it has failed already
            writer.close()

    def _tell(self, error: Exception) -> None:
        logger.warning(
            "metrics are no longer written for TensorBoard (%s), and training continues; free space in %s",
            error,
            self._folder,
        )


def _curves_by_name(entries: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, means in entries:
        for name, value in means.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def _thin_out(curve: list[T]) -> list[T]:
    """Return the last point, and others at equal distances."""
    distance = -(-len(curve) // _MAX_POINTS) or 1
    return curve[::-1][::distance][::-1]
