"""Metrics of a job for TensorBoard: what `run.log` was given, and the speed."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

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
        self._written = 0
        self._step = -1
        self._is_missing = False

    def follow(self, run: Any, speeds: Mapping[str, float]) -> None:
        """Write what was logged since the last call, and the current speed."""
        new = run.history_from(self._written)
        if self._is_missing or not (new or run.step > self._step >= 0):
            return
        if self._writer is None:
            self._open()
        if self._writer is not None:
            for name, curve in _curves_by_name(new).items():
                for step, value in _thin_out(curve):
                    self._writer.add_scalar(name, value, step)
            if run.step > self._step:
                for name, value in speeds.items():
                    self._writer.add_scalar(f"speed/{name}", value, run.step)
        self._written, self._step = self._written + len(new), run.step

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        try:
            module = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(str(self._folder), flush_secs=_FLUSH_S)
        except (ImportError, OSError):  # not installed, or the directory is not writable: training continues without
            self._is_missing = True


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
