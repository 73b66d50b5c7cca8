"""Plans of a run: measured, estimate_drift, stored; and splits that change in its middle, exact throughout."""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models import Perceptron, adamw, cross_entropy, vectors
from support.plain import plain_run
from support.runs import in_runs
from torch import nn
from torch.utils.data import default_collate

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run
from mimatrix.planner.drift import Change, Keep
from mimatrix.planner.model.plan import LeftOut, Plan, RankPlan
from mimatrix.planner.model.split import Split

BATCH, STEPS = 12, 12
PART = (RankPlan(name="rank 0", busy_s=1.0, idle_s=0.0, memory_bytes=0, room_bytes=0),)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path / "cache"))


torch.manual_seed(3)
MODEL = Perceptron().double()


def model_of() -> nn.Module:
    """Return the same model on every thread, as threads share one random stream."""
    return copy.deepcopy(MODEL)


def wanted(steps: int = STEPS, epochs: int = 1) -> dict[str, torch.Tensor]:
    model, data = model_of(), vectors(BATCH * steps)
    batches = [default_collate(data[start : start + BATCH]) for start in range(0, len(data), BATCH)]
    plain_run(model, adamw(model), batches * epochs, cross_entropy)
    return model.state_dict()


def trained(run: Run, loss: Any = cross_entropy, steps: int = STEPS, epochs: int = 1, **loading: Any) -> dict[str, Any]:
    model = model_of()
    model, optimizer, loader = run.prepare(
        model, adamw(model), vectors(BATCH * steps), loss=loss, shuffle=False, **loading
    )
    for _ in run.epochs(epochs):
        for batch in loader:
            run.backward(loss(model, batch))
            optimizer.step()
    state = {name: value.detach().clone() for name, value in run.full_state_dict(model).items()}
    return {"state": state, "run": run, "splits": [run.split]}


def check(results: Sequence[dict[str, Any]], steps: int = STEPS, epochs: int = 1) -> None:
    for result in results:
        for name, value in wanted(steps, epochs).items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-10, atol=1e-10)


class ScriptedPlans:
    """In the place of a `Drift`: the given splits, one offered after the other."""

    def __init__(self, splits: Sequence[Split], stage: int, shares: Shares) -> None:
        self._left = [plan_of(split, stage, shares) for split in splits]
        self.observed: list[Split] = []
        self.steps_left: list[int | None] = []

    def observe(self, split: Split, busy_s: Sequence[float]) -> None:
        assert all(took >= 0 for took in busy_s)
        self.observed.append(split)

    def decide(self, steps_left: int | None = None) -> Change | Keep:
        self.steps_left.append(steps_left)
        return Change(self._left.pop(0), "the test says so") if self._left else Keep("done")

    def changed(self, plan: Plan) -> None:
        pass


def plan_of(split: Split, stage: int, shares: Shares) -> Plan:
    parts = tuple(replace(PART[0], name=f"rank {rank}") for rank in range(split.ranks))
    return Plan(
        stage=stage,
        split=split,
        shares=shares,
        parts=parts,
        step_s=1.0,
        communication_s=0.0,
        reasons=("for a test",),
    )


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Any split of BATCH samples over 3 ranks."""
    ends = sorted(draw(st.lists(st.integers(0, BATCH), min_size=2, max_size=2)))
    batches = [ends[0], ends[1] - ends[0], BATCH - ends[1]]
    return Split.of(batches, draw(st.lists(st.integers(1, 6), min_size=3, max_size=3)))


def follow(run: Run, script: ScriptedPlans) -> None:
    """Let a run do as a script says."""
    prepare = run.prepare

    def prepared(*arguments: Any, **named: Any) -> Any:
        prepared = prepare(*arguments, **named)
        run._prepared().plans._drift = script  # type: ignore[assignment]
        return prepared

    run.prepare = prepared  # type: ignore[method-assign]


def test_epochs_of_one_batch_are_followed_too() -> None:
    script = ScriptedPlans([Split(((8,), (4,))), Split(((3,), (9,)))], 0, Shares.equal(2))

    def on_rank(run: Run) -> dict[str, Any]:
        follow(run, script if run.rank == 0 else ScriptedPlans([], 0, run.shares))
        return trained(run, steps=1, epochs=7)

    results = in_runs(2, on_rank, global_batch=BATCH, plan="online")
    check(results, steps=1, epochs=7)
    assert all(result["run"].split == Split(((3,), (9,))) for result in results)
    assert script.steps_left == [6, 4, 2, 1, 0]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 3), st.lists(splits(), min_size=1, max_size=4))
def test_splits_that_change_in_the_middle_change_nothing(stage: int, changes: list[Split]) -> None:
    def on_rank(run: Run) -> dict[str, Any]:
        follow(run, ScriptedPlans(changes, stage, run.shares))
        return trained(run, epochs=2)

    results = in_runs(3, on_rank, global_batch=BATCH, stage=stage, plan="online", unit_bytes=300)
    check(results, epochs=2)
    assert all(len(result["run"].plan_changes) == len(changes) for result in results)
    assert all(result["run"].split == changes[-1] for result in results)


def test_measured_plans_are_exact() -> None:
    results = in_runs(2, trained, global_batch=BATCH, plan="profile", unit_bytes=300)
    check(results)
    plans = [result["run"].plan for result in results]
    assert plans[0] == plans[1]
    assert plans[0].global_batch == BATCH
    assert plans[0].reasons


@pytest.mark.long
def test_one_rank_is_planned_too() -> None:
    results = in_runs(1, trained, global_batch=BATCH, plan="profile")
    check(results)
    assert results[0]["run"].plan.split.batches == (BATCH,)


def test_a_slow_rank_is_learned() -> None:
    def slow(run: Run) -> dict[str, Any]:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            time.sleep((0.008 if run.rank else 0.002) * len(batch[0]))
            return cross_entropy(model, batch)

        return trained(run, loss, steps=40)

    results = in_runs(2, slow, global_batch=BATCH, plan="online")
    check(results, steps=40)
    fast, late = results[0]["run"].split.batches
    assert fast >= 2 * late, results[0]["run"].plan_changes


def test_a_stored_plan_is_used(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = plan_of(Split(((5, 4), (3,))), 1, Shares((0.75, 0.25)))
    file.write_text(json.dumps(plan.to_json()))
    for given_plan in (str(file), file, plan):
        results = in_runs(2, trained, global_batch=BATCH, plan=given_plan, unit_bytes=300)
        check(results)
        assert results[0]["run"].stage == 1
        assert results[0]["run"].shares == plan.shares
        assert results[0]["run"].split == plan.split


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"split": Split(((12,),)), "shares": Shares((1.0,))}, "the plan is for 1 rank and there are 2"),
        ({"shares": Shares((1.0,))}, "the plan has 1 shares for 2 ranks; give one for each rank"),
        (
            {"split": Split(((12,),)), "left_out": (LeftOut("rank 1", "slow"),), "parts": PART},
            r"there are 2, since it leaves out rank 1; start only rank 0 .-n 1., or .* --keep-all",
        ),
        ({"split": Split(((6,), (7,)))}, "the plan is for a global batch of 13 and global_batch is 12"),
        ({"model": "another"}, "the plan was made for another model.*mimatrix profile"),
    ],
)
def test_a_plan_for_something_else_is_refused(change: dict[str, Any], sentence: str) -> None:
    plan = replace(plan_of(Split(((6,), (6,))), 0, Shares.equal(2)), **change)
    with pytest.raises(UserError, match=sentence):
        in_runs(2, trained, global_batch=BATCH, plan=plan)


def test_a_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    fields = plan_of(Split(((6,), (7,))), 0, Shares.equal(2)).to_json()
    for change, sentence in (({}, "is for a global batch of 13"), ({"step_s": 0}, "is damaged .step_s is 0")):
        file.write_text(json.dumps(fields | change))
        with pytest.raises(UserError, match=f'plan="{file}" {sentence}'):
            in_runs(2, trained, global_batch=BATCH, plan=str(file))


@pytest.mark.parametrize(
    ("given_settings", "sentence"),
    [
        ({"plan": "profile", "batch": [6, 6]}, "leave out either plan or batch"),
        ({"plan": "online"}, "a plan splits a global batch; set global_batch"),
        ({"plan": "no-such-file", "global_batch": BATCH}, 'plan="no-such-file" cannot be read'),
        ({"rebalance": True, "global_batch": BATCH}, 'rebalance needs a plan.*plan="auto"'),
    ],
)
def test_bad_input_is_refused(given_settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        in_runs(2, trained, **given_settings)


def test_measuring_needs_the_loss() -> None:
    def on_rank(run: Run) -> None:
        model = model_of()
        run.prepare(model, adamw(model), vectors(BATCH))

    with pytest.raises(UserError, match=r"give run\.prepare the loss: loss=loss_fn"):
        in_runs(2, on_rank, global_batch=BATCH, plan="profile")


@pytest.mark.long
def test_what_one_rank_cannot_do_is_said_by_all() -> None:
    errors: list[str] = []

    def on_rank(run: Run) -> None:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            if run.rank == 1:
                raise UserError("this rank cannot run the model; use another")
            return cross_entropy(model, batch)

        try:
            trained(run, loss)
        except UserError as error:
            errors.append(str(error))

    in_runs(2, on_rank, global_batch=BATCH, plan="profile")
    assert errors == ["rank 1: this rank cannot run the model; use another"] * 2
