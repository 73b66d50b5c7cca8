"""What `run.log` was given is in `run.history`: in the loop's body as means over ranks, outside it at once."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from support.features import ALONE, PAIR, THREE
from support.models import cross_entropy, seeded_perceptron, vectors
from support.runs import in_runs
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.mode import Membership
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World

on_ranks = pytest.mark.parametrize("split", [ALONE, PAIR, THREE], ids=["alone", "pair", "three"])
HELD_OUT = vectors(7)
Entries = list[tuple[int, dict[str, float]]]


def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"val": cross_entropy(model, batch)}


def prepared(run: Run) -> tuple[nn.Module, Any, Any]:
    model, optimizer = seeded_perceptron()
    return run.prepare(model, optimizer, vectors(10), shuffle=False)


def train_step(run: Run, model: nn.Module, optimizer: Any, batch: Any, **more: float) -> None:
    loss = cross_entropy(model, batch)
    run.backward(loss)
    optimizer.step()
    run.log(loss=loss, **more)


def names(history: Entries) -> list[tuple[int, list[str]]]:
    return [(step, sorted(values)) for step, values in history]


@on_ranks
def test_validation_after_each_epoch_is_recorded_at_once_the_last_one_too(split: dict[str, Any]) -> None:
    def on_rank(run: Run) -> tuple[Entries, list[float]]:
        model, optimizer, loader = prepared(run)
        found = [run.evaluate(model, HELD_OUT, measure)["val"]]
        run.log(val=found[0])
        for epoch in run.epochs(2):
            for batch in loader:
                train_step(run, model, optimizer, batch)
            found.append(run.evaluate(model, HELD_OUT, measure)["val"])
            run.log(val=torch.tensor(found[-1], dtype=torch.float64))
            assert run.history[-1] == (2 * epoch + 2, {"val": found[-1]})
        return run.history, found

    for history, found in in_runs(len(split["batch"]), on_rank, **split):
        in_order = [
            (0, ["val"]),
            (0, ["loss"]),
            (1, ["loss"]),
            (2, ["val"]),
            (2, ["loss"]),
            (3, ["loss"]),
            (4, ["val"]),
        ]
        assert names(history) == in_order
        assert [values["val"] for _, values in history if "val" in values] == found


def test_outside_the_body_rank_0_may_log_alone_and_no_rank_waits() -> None:
    def on_rank(run: Run) -> list[tuple[int, list[str]]]:
        model, optimizer, loader = prepared(run)
        if run.rank == 0:
            run.log(val=1.0)
        for batch in loader:
            train_step(run, model, optimizer, batch)
        if run.rank == 0:
            run.log(val=0.5)
        return names(run.history)

    training = [(0, ["loss"]), (1, ["loss"])]
    assert in_runs(2, on_rank, **PAIR) == [[(0, ["val"]), *training, (2, ["val"])], training]


@on_ranks
def test_what_the_last_body_logged_before_a_break_comes_before_the_validation(split: dict[str, Any]) -> None:
    def on_rank(run: Run) -> Entries:
        model, optimizer, loader = prepared(run)
        for batch in loader:
            train_step(run, model, optimizer, batch)
            if not run.in_batch:
                break
        run.log(**run.evaluate(model, HELD_OUT, measure))
        return run.history

    results = in_runs(len(split["batch"]), on_rank, **split)
    assert names(results[0]) == [(0, ["loss"]), (1, ["val"])]
    for history in results:
        assert history == results[0]


def batch_losses(split: dict[str, Any]) -> list[float]:
    """Return the losses of a loop that runs to its end."""

    def on_rank(run: Run) -> list[float]:
        model, optimizer, loader = prepared(run)
        for batch in loader:
            train_step(run, model, optimizer, batch)
        return [values["loss"] for _, values in run.history]

    return in_runs(len(split["batch"]), on_rank, **split)[0]


@on_ranks
@pytest.mark.parametrize("kept", [False, True], ids=["break", "next"])
def test_nothing_is_lost_when_the_run_ends_after_the_last_body(split: dict[str, Any], kept: bool) -> None:
    """Left by `break`, or never: an iterator that is kept and not drawn to its end."""

    def on_rank(run: Run) -> Entries:
        model, optimizer, loader = prepared(run)
        iterator = iter(loader)
        if split is not THREE:  # a rank without data does not run the body
            while run.step < 1:
                train_step(run, model, optimizer, next(iterator))
        else:
            for batch in iterator:
                train_step(run, model, optimizer, batch)
                if not run.in_batch:
                    break
        if not kept:
            del iterator
        run.flush_log()
        return run.history

    expected = batch_losses(split)[:1]
    for history in in_runs(len(split["batch"]), on_rank, **split):
        assert names(history) == [(0, ["loss"])]
        assert [values["loss"] for _, values in history] == pytest.approx(expected, abs=1e-10)


def test_a_kept_iterator_is_left_when_the_next_epoch_begins() -> None:
    def on_rank(run: Run) -> list[tuple[int, list[str]]]:
        model, optimizer, loader = prepared(run)
        iterators = []
        for _ in run.epochs(2):
            iterators.append(iter(loader))
            end = run.step + 2
            while run.step < end:
                train_step(run, model, optimizer, next(iterators[-1]))
        run.log(val=1.0)
        return names(run.history)

    loss = [(step, ["loss"]) for step in range(4)]
    for history in in_runs(2, on_rank, **PAIR):
        assert history == [*loss, (4, ["val"])]


def alone() -> Run:
    run = Run(Membership(World.join(Settings(global_batch=5, quiet=True))))
    prepared(run)
    return run


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("hello", "the string 'hello'"),
        ("1.5", "the string '1.5'"),
        (None, "None"),
        (torch.ones(3), r"a Tensor of shape \[3\]"),
        (np.ones((2, 1)), r"a ndarray of shape \[2, 1\]"),
        (torch.tensor(1j), "a Tensor that is not a real number"),
        ([1.0], "a list that is not a real number"),
        (10**400, "an integer that is too large for a float"),
    ],
)
@pytest.mark.parametrize("in_body", [False, True])
def test_what_is_not_a_number_is_refused_where_it_is_logged(value: Any, given: str, in_body: bool) -> None:
    run = Run(Membership(World.join(Settings(global_batch=5, quiet=True))))
    _, _, loader = prepared(run)
    if in_body:
        next(iter(loader))
    with pytest.raises(
        UserError, match=rf"^run\.log\(v=\.\.\.\) was given {given}; give a number or a tensor with one"
    ):
        run.log(loss=1.0, v=value)
    run.log(loss=2.0)
    run.close()
    assert run.history == [(0, {"loss": 2.0})]


def test_a_dict_of_metrics_as_wandb_takes_it_is_refused() -> None:
    run = Run(Membership(World.join(Settings(global_batch=5, quiet=True))))
    prepared(run)
    with pytest.raises(UserError, match=r"give names: run\.log\(loss=\.\.\.\)"):
        run.log({"loss": 1.0})


def test_numbers_of_all_kinds_are_logged() -> None:
    run = alone()
    run.log(
        a=True, b=np.float32(0.5), c=torch.tensor([[3]]), d=float("inf"), e=torch.tensor(float("nan")), f=np.ones(1)
    )
    ((step, values),) = run.history
    assert (step, [values[name] for name in "abcdf"]) == (0, [1.0, 0.5, 3.0, float("inf"), 1.0])
    assert values["e"] != values["e"]


def test_not_finite_values_are_merged_over_ranks() -> None:
    def on_rank(run: Run) -> str:
        model, optimizer, loader = prepared(run)
        for batch in loader:
            train_step(run, model, optimizer, batch, nan=float("nan") if run.rank else 0.0, inf=float("inf"))
        return str([(values["nan"], values["inf"]) for _, values in run.history])

    assert set(in_runs(2, on_rank, **PAIR)) == {"[(nan, inf), (nan, inf)]"}


def test_log_lines_show_steps_now_and_then_and_every_validation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    log = MetricLog(shows=True)
    with caplog.at_level(logging.INFO, "mimatrix.engine.loop.metrics"):
        for step in range(3):
            now_s += 1.5
            log.begin_micro_step(step)
            log.set_weight(1.0)
            log.log({"loss": 0.5 + step}, step)
            log.merge_local(step + 1)
        log.leave_body(3)
        for name, value in (("val", 0.25), ("accuracy", 0.75), ("val", 0.125)):
            log.log({name: value}, 3 if value > 0.2 else 4)
        log.finish(4)
    assert caplog.messages == ["step 2  loss 1.5", "step 3  val 0.25", "step 3  accuracy 0.75", "step 4  val 0.125"]
