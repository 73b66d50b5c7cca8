"""What a job writes for TensorBoard."""

from pathlib import Path

import pytest

from mimatrix.worker.tensorboard import TensorBoardWriter


class FakeRun:
    """Logs a loss in each step, and an accuracy once."""

    step = 100

    def history_from(self, start: int) -> list[tuple[int, dict[str, float]]]:
        return [(step, {"loss": 1 / (1 + step)} | ({"accuracy": 0.5} if step == 41 else {})) for step in range(100)][
            start:
        ]


def test_tensorboard_curves_are_thinned_out_and_rare_points_kept(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoardWriter(tmp_path)
    for _ in range(2):
        writer.follow(FakeRun(), {"step_s": 0.01})
    writer.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    steps = {name: [each.step for each in found.Scalars(name)] for name in ("loss", "accuracy", "speed/step_s")}
    assert steps == {"loss": list(range(9, 100, 10)), "accuracy": [41], "speed/step_s": [100]}
