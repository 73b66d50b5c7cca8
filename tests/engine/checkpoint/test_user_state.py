"""What a script gives `run.save` comes back after `run.load`, on every rank."""

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.storage import list_checkpoints
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)

STATE: dict[str, Any] = {
    "best": 0.1 + 0.2,
    "args": {"lr": 1e-3, "name": "run", "amp": None, "steps": [1, 2, (3, True)], 4: "four"},
    "ema": OrderedDict(weight=torch.arange(6, dtype=torch.float64).view(2, 3).t(), count=torch.tensor(7)),
    "empty": torch.empty(0, 2),
    "mask": (torch.tensor([True, False]), torch.ones(2, dtype=torch.bfloat16)),
    "nan": float("inf"),
}


def prepare(run: Run) -> tuple[Any, Any, Any]:
    model = Perceptron().double()
    return run.prepare(model, adamw(model), vectors(40), loss=cross_entropy)


def train(run: Run, each_step: Any = lambda: None) -> None:
    model, optimizer, loader = prepare(run)
    for batch in loader:
        run.backward(cross_entropy(model, batch))
        optimizer.step()
        if not run.in_batch:
            each_step()


def load(folder: Path) -> list[dict[str, Any]]:
    def on_rank(run: Run) -> dict[str, Any]:
        assert run.user_state == {}
        prepare(run)
        assert run.user_state == {}
        assert run.load(folder)
        return run.user_state

    return in_runs(2, on_rank, batch=[3, 5], stage=3)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.device.type == "cpu"
        assert torch.equal(one, other)
    elif isinstance(other, dict):
        assert list(one) == list(other)
        for key in other:
            assert_equal(one[key], other[key])
    elif isinstance(other, list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for item, expected in zip(one, other, strict=True):
            assert_equal(item, expected)
    else:
        assert one == other
        assert type(one) is type(other)


@pytest.mark.parametrize("batch", [[8], [3, 0, 5], [0, 8]])
def test_user_state_comes_back_on_every_rank(batch: list[int], tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        train(run, lambda: run.save(tmp_path, user_state=STATE) if run.step == 2 else None)
        run.close()

    in_runs(len(batch), on_rank, batch=batch, stage=2)
    for state in load(tmp_path):
        assert_equal(state, STATE)


def test_a_checkpoint_without_user_state_has_an_empty_one(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepare(run)
        run.save(tmp_path, wait=True)

    in_runs(1, on_rank, batch=[8])
    assert load(tmp_path) == [{}, {}]


@pytest.mark.parametrize("batch", [[3, 5], [0, 8], [8, 0]])
def test_the_last_user_state_is_saved_again_by_preemption(batch: list[int], tmp_path: Path) -> None:
    """Also where the first rank has no data, and so was not given it."""

    def on_rank(run: Run) -> None:
        run.enable_preemption(lambda: run.step >= 2, tmp_path / "job")
        with pytest.raises(SystemExit):
            train(run, lambda: run.save(tmp_path / "mine", user_state={"step": run.step}) if run.step == 1 else None)

    in_runs(2, on_rank, batch=batch)
    assert load(tmp_path / "job") == [{"step": 1}, {"step": 1}]


def test_loaded_user_state_is_saved_again(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        if not prepare(run) or not run.load(tmp_path):
            run.save(tmp_path, user_state={"best": torch.ones(3)}, wait=True)
        else:
            run.save(tmp_path / "again", wait=True)

    in_runs(1, on_rank, batch=[8])
    in_runs(2, on_rank, batch=[8, 0])
    for state in load(tmp_path / "again"):
        assert_equal(state, {"best": torch.ones(3)})


def test_later_changes_do_not_reach_a_checkpoint(tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepare(run)
        state: dict[str, Any] = {"best": torch.ones(3), "list": [1]}
        run.save(tmp_path, user_state=state)
        state["best"].zero_()
        state["list"].append(2)
        run.close()

    in_runs(1, on_rank, batch=[8])
    assert_equal(load(tmp_path)[0], {"best": torch.ones(3), "list": [1]})
    metadata = json.loads((list_checkpoints(tmp_path)[0] / "run.json").read_text())
    assert "user_state" in metadata


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"args": argparse.Namespace(lr=1)}, r"user_state\['args'\] is a Namespace, .* give numbers"),
        ({"a": [1, {"b": object()}]}, r"user_state\['a'\]\[1\]\['b'\] is a object"),
        ({(1, 2): 3}, r"user_state has the key \(1, 2\); give keys"),
        ({"a": 1j}, r"user_state\['a'\] is a complex"),
        ({"a": torch.ones(2).to_sparse()}, r"user_state\['a'\] is a sparse tensor"),
        ([1], "user_state is a list; give a dict"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_at_once(state: Any, message: str, tmp_path: Path) -> None:
    def on_rank(run: Run) -> None:
        prepare(run)
        with pytest.raises(UserError, match=message):
            run.save(tmp_path, user_state=state)

    in_runs(1, on_rank, batch=[8])
    assert list(tmp_path.iterdir()) == []
