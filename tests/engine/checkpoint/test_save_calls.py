"""Arguments of `run.save` that are wrong, or that differ between ranks, are refused with one sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)
RECURSIVE: dict[str, Any] = {}
RECURSIVE["self"] = [RECURSIVE]


def prepare(run: Run) -> None:
    model = Perceptron().double()
    run.prepare(model, adamw(model), vectors(16), loss=cross_entropy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 1.5}, "keep is 1.5; give the number of checkpoints to keep, at least 1"),
        ({"keep": "3"}, "keep is '3'; give the number of checkpoints to keep, at least 1"),
        ({"keep": 0}, "keep is 0; give"),
        ({"user_state": RECURSIVE}, "user_state contains itself, or is nested too deeply; give dicts"),
    ],
)
def test_a_wrong_argument_is_refused_by_the_call(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepare(run)
        with pytest.raises(UserError, match=message):
            run.save(tmp_path, **arguments)

    in_runs(1, on_rank, batch=[8])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "below/it"])
@pytest.mark.parametrize("batch", [[8], [3, 5]])
def test_a_file_in_place_of_the_folder_is_refused_by_the_call(batch: list[int], below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def on_rank(run: Run) -> None:
        prepare(run)
        with pytest.raises(UserError, match=r"run.save was given the folder .*, but .*/file is a file; give another"):
            run.save(tmp_path / "file" / below)

    in_runs(len(batch), on_rank, batch=batch)


@pytest.mark.parametrize(
    ("of_rank", "message"),
    [
        (lambda rank: {"folder": f"{rank}"}, r"run.save was given folder='.*/0' on rank 0 and folder='.*/1' on rank 1"),
        (lambda rank: {"keep": 1 + rank}, "run.save was given keep=1 on rank 0 and keep=2 on rank 1; give it the same"),
        (lambda rank: {"metric": 0.5 + rank}, "the metric is 0.5 on rank 0 and 1.5 on rank 1; give run.save the same"),
        (lambda rank: {"user_state": {"a": 1, "b": [rank]}}, r"user_state\['b'\] differs between rank 0 and rank 1; "),
        (lambda rank: {"user_state": {"r": torch.tensor([rank, 1])}}, r"user_state\['r'\] differs between"),
        (lambda rank: {"user_state": {"loss": torch.tensor(float(rank))}}, r"user_state\['loss'\] differs between"),
        (lambda rank: {"user_state": {"a": 1} if rank else None}, "user_state on rank 1 and none on rank 0; give"),
    ],
)
def test_arguments_that_differ_between_ranks_are_refused_on_all(of_rank: Any, message: str, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepare(run)
        arguments = of_rank(run.rank)
        folder = tmp_path / arguments.pop("folder", "one")
        with pytest.raises(UserError, match=message):
            run.save(folder, wait=True, **arguments)
        run.save(tmp_path / "after", wait=True)

    in_runs(2, on_rank, batch=[3, 5])
    left = [path.name for path in tmp_path.rglob("*") if path.name.startswith((".unfinished", "step"))]
    assert left == ["step-00000000"]


def test_weights_that_devices_round_differently_are_one_user_state(tmp_path: Path) -> None:
    def on_rank(run: Run) -> Any:
        prepare(run)
        run.save(tmp_path, user_state={"ema": torch.full((3,), 1.0 + run.rank * 1e-7)}, wait=True)
        run.load(tmp_path)
        return run.user_state["ema"]

    for ema in in_runs(2, on_rank, batch=[3, 5]):
        assert torch.equal(ema, torch.ones(3))


def test_numpy_scalars_of_every_kind_come_back_as_numbers(tmp_path: Path) -> None:
    state: Any = {
        "f": np.float32(0.1),
        "d": np.float64(0.1),
        "i": np.int64(3),
        "b": np.bool_(True),
        "s": np.str_("x"),
        np.int32(7): np.float16(0.5),
    }

    def on_rank(run: Run) -> Any:
        prepare(run)
        run.save(tmp_path, user_state=state, wait=True)
        run.load(tmp_path)
        return run.user_state

    back = in_runs(1, on_rank, batch=[8])[0]
    assert back == {"f": float(np.float32(0.1)), "d": 0.1, "i": 3, "b": True, "s": "x", 7: 0.5}
    assert {type(value) for value in back.values()} == {float, int, bool, str}
