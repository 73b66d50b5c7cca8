"""What a job writes for TensorBoard."""

from pathlib import Path

import pytest

from mimatrix.worker.tensorboard import TensorBoardWriter


def test_tensorboard_curves_are_thinned_out_and_rare_points_kept(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = TensorBoardWriter(tmp_path)
    logged = [(step, {"loss": 1 / (1 + step)} | ({"accuracy": 0.5} if step == 41 else {})) for step in range(100)]
    for new in (logged, [], [(100, {"accuracy": 0.75})]):
        writer.write(new)
        writer.write_speeds(100, {"step_s": 0.01})
    writer.close()
    writer.write([(101, {"late": 1.0})])
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    steps = {name: [each.step for each in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert steps == {"loss": list(range(9, 100, 10)), "accuracy": [41, 100], "speed/step_s": [100]}
