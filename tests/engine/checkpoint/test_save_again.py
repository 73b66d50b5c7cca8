"""A second `run.save` of a step into the same folder: what is new about it is saved, and the rest is not repeated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.runs import in_runs

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.run import Run

pytestmark = pytest.mark.timeout(60)
BATCHES = [[8], [3, 5]]
Result = tuple[dict[str, Any], list[str], list[float]]


def prepare(run: Run) -> tuple[Any, Any, Any]:
    model = Perceptron().double()
    return run.prepare(model, adamw(model), vectors(16), loss=cross_entropy)


def saved_by(batch: list[int], folder: Path, save: Callable[[Run], None]) -> Result:
    """Return what comes back from what `save` saved: the user's state, the names and the times of the checkpoints."""

    def on_rank(run: Run) -> None:
        prepare(run)
        save(run)
        run.close()

    def load(run: Run) -> dict[str, Any]:
        prepare(run)
        run.load(folder)
        return run.user_state

    in_runs(len(batch), on_rank, batch=batch)
    names = sorted(path.name for path in folder.iterdir())
    times = [info.at_s for info in storage.describe_checkpoints(folder)]
    states = in_runs(len(batch), load, batch=batch)
    assert all(state == states[0] for state in states)
    return states[0], names, times


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_another_user_state_at_the_same_step_replaces_the_first(batch: list[int], wait: bool, tmp_path: Path) -> None:
    def save(run: Run) -> None:
        for best in (0.1, 0.5, 0.7):
            run.save(tmp_path, user_state={"best": best}, wait=wait)

    state, names, _ = saved_by(batch, tmp_path, save)
    assert state == {"best": 0.7}
    assert names == ["step-00000000"]


@pytest.mark.parametrize("batch", BATCHES)
def test_another_metric_at_the_same_step_replaces_the_first(batch: list[int], tmp_path: Path) -> None:
    def save(run: Run) -> None:
        run.save(tmp_path, keep=1, metric=0.5, user_state={"by": "the first"})
        run.save(tmp_path, keep=1, metric=0.7)
        run.save(tmp_path, keep=1, metric=0.6, user_state={"by": "the last"})

    state, names, _ = saved_by(batch, tmp_path, save)
    assert state == {"by": "the last"}
    assert names == ["step-00000000"]
    assert [info.metric for info in storage.describe_checkpoints(tmp_path)] == [0.6]


def test_a_user_state_given_again_with_the_same_metric_is_saved(tmp_path: Path) -> None:
    def save(run: Run) -> None:
        run.save(tmp_path, keep=1, metric=0.5, user_state={"epoch": 1})
        run.save(tmp_path, keep=1, metric=0.5, user_state={"epoch": 2})

    assert saved_by([8], tmp_path, save)[:2] == ({"epoch": 2}, ["step-00000000"])


@pytest.mark.parametrize("batch", BATCHES)
def test_a_save_with_nothing_new_is_not_written_again(batch: list[int], tmp_path: Path) -> None:
    first: list[float] = []

    def save(run: Run) -> None:
        run.save(tmp_path, user_state={"best": 0.1}, wait=True)
        first.append(storage.describe_checkpoints(tmp_path)[0].at_s)
        run.save(tmp_path, wait=True)

    state, names, times = saved_by(batch, tmp_path, save)
    assert state == {"best": 0.1}
    assert names == ["step-00000000"]
    assert times == first[:1]


def test_only_the_checkpoint_of_this_run_is_replaced(tmp_path: Path) -> None:
    def save(run: Run) -> None:
        run.save(tmp_path, user_state={"best": 0.1})
        run.save(tmp_path, user_state={"best": 0.2})

    assert saved_by([8], tmp_path, save)[1] == ["step-00000000"]
    assert saved_by([8], tmp_path, save)[1] == ["step-00000000", "step-00000000-2"]


def test_a_second_save_in_a_batch_without_data_on_a_rank_is_refused_only_with_something_new(tmp_path: Path) -> None:
    def train(run: Run, *, again: dict[str, Any] | None) -> None:
        model, optimizer, loader = prepare(run)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            run.save(tmp_path, user_state={"step": run.step})
            run.save(tmp_path, user_state=again)
        run.close()

    in_runs(2, lambda run: train(run, again=None), batch=[8, 0])
    assert len(storage.list_checkpoints(tmp_path)) == 2
    with pytest.raises(UserError, match=r"rank 1 has no data in this batch and does not come to a second run\.save"):
        in_runs(2, lambda run: train(run, again={"step": 0}), batch=[8, 0])
