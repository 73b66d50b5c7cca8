"""A disk that is full costs checkpoints, not the training: each failure is told, and the last one is raised."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import adamw, cross_entropy, vectors
from support.runs import in_runs
from torch import nn

from mimatrix.core.errors import SaveError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.run import Run

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")]

STEPS = 6
BATCHES = [[8], [3, 5]]
CHECKPOINT_BYTES = 20_003 * 8 * 3
"""Parameters of float64, and two moments of AdamW for each."""


class Disk:
    """A small file system."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self._filler = folder / "disk", folder / "disk" / "filler"
        self.folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "mimatrix-test", str(self.folder)]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount a tmpfs")

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)

    def free(self) -> None:
        self._filler.unlink()

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[float], Disk]]:
    disks: list[Disk] = []

    def make(checkpoints: float) -> Disk:
        disks.append(Disk(tmp_path, int(checkpoints * CHECKPOINT_BYTES)))
        return disks[-1]

    yield make
    for disk in disks:
        disk.unmount()


def train(run: Run, each_step: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 3)).double()
    _, optimizer, loader = run.prepare(model, adamw(model), vectors(8 * STEPS), loss=cross_entropy)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        optimizer.step()
        if not run.in_batch:
            each_step()


def steps(folder: Path) -> list[int]:
    return [storage.read_metadata(path)["step"] for path in storage.list_checkpoints(folder)]


def saved_once_then_full(run: Run, disk: Disk, each_step: Callable[[], None] = lambda: None) -> None:
    """Train, save after each step, and fill the disk after the first one."""

    def save() -> None:
        each_step()
        if run.step == 2 and run.rank == 0:
            disk.fill()
        run.save(disk.folder, keep=1, wait=run.step == 1)

    train(run, save)


@pytest.mark.parametrize("batch", BATCHES)
def test_training_goes_on_while_the_disk_is_full(
    batch: list[int], make_disk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    disk = make_disk(4)

    def on_rank(run: Run) -> int:
        def make_room() -> None:
            if run.step == 4 and run.rank == 0:
                assert steps(disk.folder) == [1], "the last good one stays"
                disk.free()

        saved_once_then_full(run, disk, make_room)
        run.close()
        return run.step

    assert in_runs(len(batch), on_rank, batch=batch, stage=1) == [STEPS] * len(batch)
    assert steps(disk.folder) == [STEPS]
    told = [line for line in caplog.messages if "the checkpoint of step 2 is not saved" in line]
    assert len(told) == 1
    assert "training continues" in told[0]


@pytest.mark.parametrize("batch", BATCHES)
def test_the_last_failed_save_is_raised_at_the_end(batch: list[int], make_disk: Any) -> None:
    disk = make_disk(4)

    def on_rank(run: Run) -> int:
        saved_once_then_full(run, disk)
        with pytest.raises(SaveError, match="the checkpoint of step 6 is not saved"):
            run.close()
        return run.step

    assert in_runs(len(batch), on_rank, batch=batch, max_failed_saves=100) == [STEPS] * len(batch)
    assert steps(disk.folder) == [1]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("most", "stops_at"), [(1, 3), (2, 4), (3, 5)])
def test_failed_saves_in_a_row_stop_the_training(batch: list[int], most: int, stops_at: int, make_disk: Any) -> None:
    disk = make_disk(4)

    def on_rank(run: Run) -> int:
        with pytest.raises(SaveError, match=f"the checkpoint of step {stops_at - 1} is not saved"):
            saved_once_then_full(run, disk)
        return run.step

    assert in_runs(len(batch), on_rank, batch=batch, max_failed_saves=most) == [stops_at] * len(batch)


@pytest.mark.parametrize("batch", BATCHES)
def test_an_old_checkpoint_makes_room_for_the_new_one(batch: list[int], make_disk: Any) -> None:
    disk = make_disk(2.6)

    def on_rank(run: Run) -> None:
        train(run, lambda: run.save(disk.folder, keep=2))
        run.close()

    in_runs(len(batch), on_rank, batch=batch, max_failed_saves=1)
    assert steps(disk.folder) == [6, 5]


@pytest.mark.parametrize("batch", BATCHES)
def test_the_only_checkpoint_is_not_removed_to_make_room(batch: list[int], make_disk: Any) -> None:
    disk = make_disk(1.5)

    def on_rank(run: Run) -> None:
        train(run, lambda: run.save(disk.folder, keep=1))
        with pytest.raises(SaveError, match="No space left"):
            run.close()

    in_runs(len(batch), on_rank, batch=batch, max_failed_saves=100)
    assert steps(disk.folder) == [1]


def test_a_damaged_checkpoint_does_not_count_as_the_one_that_stays(make_disk: Any) -> None:
    """The newest is not whole, so the one before it is the last that can be loaded."""
    disk = make_disk(2.6)

    def on_rank(run: Run) -> None:
        def save() -> None:
            run.save(disk.folder, keep=2, wait=run.step <= 2)
            if run.step == 2:
                (disk.folder / "step-00000002" / "__0_0.distcp").write_bytes(b"")
                disk.fill()

        train(run, save)
        with pytest.raises(SaveError, match="No space left"):
            run.close()

    in_runs(1, on_rank, batch=[8], max_failed_saves=100)
    assert 1 in steps(disk.folder)


def test_what_a_failed_save_has_written_is_removed(make_disk: Any) -> None:
    disk = make_disk(1.5)

    def on_rank(run: Run) -> None:
        train(run, lambda: run.save(disk.folder, keep=1, wait=run.step == 1))
        with pytest.raises(SaveError):
            run.close()

    in_runs(1, on_rank, batch=[8], max_failed_saves=100)
    assert [path.name for path in disk.folder.iterdir()] == ["step-00000001"]
    assert shutil.disk_usage(disk.folder).free > 0.3 * CHECKPOINT_BYTES
