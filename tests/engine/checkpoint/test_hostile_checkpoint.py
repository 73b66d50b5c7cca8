"""A checkpoint from somewhere else runs no code, wherever in it the code is."""

import base64
import builtins
import json
import pickle
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import in_runs
from test_manager import TASKS, PreparedTask, settings

from mimatrix.core.errors import MiMatrixError
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)


class CreatesFile:
    """An object that creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return builtins.open, (str(self._file), "w")


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    metadata = json.loads((checkpoint / "run.json").read_text())
    change(metadata)
    (checkpoint / "run.json").write_text(json.dumps(metadata))


def replace_file(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file, and its checksum."""
    (checkpoint / name).write_bytes(content)
    edit(checkpoint, lambda metadata: metadata["files"].update({name: [len(content), zlib.crc32(content)]}))


def in_settings(checkpoint: Path, evil: CreatesFile) -> None:
    packed = {"pickle": base64.b64encode(pickle.dumps(evil)).decode()}
    edit(checkpoint, lambda metadata: metadata["groups"][0]["settings"]["dict"].update(betas=packed))


def in_scheduler(checkpoint: Path, evil: CreatesFile) -> None:
    packed = {"pickle": base64.b64encode(pickle.dumps(evil)).decode()}
    edit(checkpoint, lambda metadata: metadata["schedulers"][0]["state"]["dict"].update(gamma=packed))


def in_user_state(checkpoint: Path, evil: CreatesFile) -> None:
    packed = {"pickle": base64.b64encode(pickle.dumps(evil)).decode()}
    edit(checkpoint, lambda metadata: metadata.update(user_state={"dict": {"best": packed}}))


def in_index(checkpoint: Path, evil: CreatesFile) -> None:
    replace_file(checkpoint, ".metadata", pickle.dumps(evil))


def in_shard(checkpoint: Path, evil: CreatesFile) -> None:
    (checkpoint / "part.pt").unlink(missing_ok=True)
    torch.save(evil, checkpoint / "part.pt")
    content = (checkpoint / "part.pt").read_bytes()
    (checkpoint / "part.pt").unlink()
    size = (checkpoint / "__0_0.distcp").stat().st_size
    replace_file(checkpoint, "__0_0.distcp", content.ljust(size, b"\0"))


def in_plain_shard(checkpoint: Path, evil: CreatesFile) -> None:
    size = (checkpoint / "__0_0.distcp").stat().st_size
    replace_file(checkpoint, "__0_0.distcp", pickle.dumps(evil, protocol=2).ljust(size, b"\0"))


PLACES = [in_settings, in_scheduler, in_user_state, in_index, in_shard, in_plain_shard]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        prepared.train(epochs=1)
        run.save(tmp_path / "saved", user_state={"best": 0.5}, wait=True)

    in_runs(1, on_rank, **settings({"global_batch": 8}))
    return tmp_path / "saved" / "step-00000006"


@pytest.mark.parametrize("place", PLACES)
def test_loading_a_hostile_checkpoint_runs_no_code(
    place: Callable[[Path, CreatesFile], None], checkpoint: Path, tmp_path: Path
) -> None:
    place(checkpoint, CreatesFile(tmp_path / "created"))

    def on_rank(run: Run) -> None:
        prepared = PreparedTask(run, TASKS["perceptron"])
        before = [parameter.detach().clone() for parameter in prepared.model.parameters()]
        if place is in_index:  # torch reads that file, and we do not
            assert run.load(checkpoint)
            return
        with pytest.raises(MiMatrixError) as caught:
            run.load(checkpoint)
        assert "weights_only" not in str(caught.value)
        assert run.step == 0
        assert all(map(torch.equal, before, prepared.model.parameters()))

    in_runs(1, on_rank, **settings({"global_batch": 8}))
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("place", [in_index, in_shard, in_user_state])
def test_exporting_a_hostile_checkpoint_runs_no_code(
    place: Callable[[Path, CreatesFile], None], checkpoint: Path, tmp_path: Path
) -> None:
    place(checkpoint, CreatesFile(tmp_path / "created"))
    module, file = "mimatrix.engine.checkpoint.export", tmp_path / "model.safetensors"
    command = [sys.executable, "-m", module, str(checkpoint), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not (tmp_path / "created").exists()
    report = json.loads(done.stdout.splitlines()[-1])
    assert ("error" in report) == (place is in_shard)


@pytest.mark.parametrize("name", ["../outside", "/dev/zero", "sub/file", ".."])
def test_a_checkpoint_names_only_its_own_files(name: str, checkpoint: Path) -> None:
    edit(checkpoint, lambda metadata: metadata["files"].update({name: [0, 0]}))

    def on_rank(run: Run) -> None:
        PreparedTask(run, TASKS["perceptron"])
        with pytest.raises(MiMatrixError, match="names a file that is not in it"):
            run.load(checkpoint)

    in_runs(1, on_rank, **settings({"global_batch": 8}))


def test_a_shard_outside_of_the_checkpoint_is_not_read(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "tensors.json").read_text())
    for entry in index.values():
        for chunk in entry["chunks"]:
            chunk[2] = "../elsewhere"
    replace_file(checkpoint, "tensors.json", json.dumps(index).encode())

    def on_rank(run: Run) -> None:
        PreparedTask(run, TASKS["perceptron"])
        with pytest.raises(MiMatrixError, match="names a file that is not in it"):
            run.load(checkpoint)

    in_runs(1, on_rank, **settings({"global_batch": 8}))
