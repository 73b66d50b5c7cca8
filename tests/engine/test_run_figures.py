"""What a run tells: evaluation, logs, where the time went, weights; and how a loop may be left."""

import copy
import statistics
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, THREE, Case, in_one, same
from support.models import Perceptron, momentum, squared, vectors
from support.runs import in_runs
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from mimatrix.engine.data.source import DataPosition
from mimatrix.engine.run import Run
from mimatrix.planner.split import Split

in_stages = pytest.mark.parametrize("stage", range(4))
UNITS: dict[str, Any] = {"unit_bytes": 300}
SEEDING = threading.Lock()
"""Ranks are threads, and there is one random stream."""


def made() -> tuple[Perceptron, torch.optim.Optimizer]:
    with SEEDING:
        torch.manual_seed(3)
        model = Perceptron()
        model.double()
    return model, momentum(model)


def numbered(count: int) -> list[Any]:
    return [(x, y, number) for number, (x, y) in enumerate(vectors(count))]


@pytest.mark.parametrize(("samples", "stage"), [(1, 3), (2, 2), (13, 0), (13, 3)])
def test_evaluation_sees_every_sample_once(samples: int, stage: int) -> None:
    seen: list[int] = []

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        assert not model.training
        seen.extend(batch[2].tolist())
        loss = squared(model, batch[:2])
        return {"loss": loss, "twice": 2 * loss, "weight": float((batch[2] + 1).sum())}

    def each(run: Run) -> dict[str, float]:
        model, optimizer = made()
        run.prepare(model, optimizer, vectors(15))
        model.frozen.eval()
        found = run.evaluate(model, numbered(samples), measure)
        assert model.training
        assert not model.frozen.training
        return found

    results = in_runs(3, each, stage=stage, **THREE, **UNITS)
    assert Counter(seen) == Counter(range(samples))
    assert all(found == results[0] for found in results)
    assert results[0]["twice"] == pytest.approx(2 * results[0]["loss"], abs=1e-12)


@in_stages
def test_evaluation_is_exact_in_the_middle_of_training(stage: int) -> None:
    """At the boundary of a batch, and by samples: all of it as in one process."""
    data, held_out = vectors(15), vectors(7)

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": squared(model, batch)}

    def each(run: Run) -> list[float]:
        model, optimizer = made()
        _, optimizer, loader = run.prepare(model, optimizer, data, shuffle=False)
        found = [run.evaluate(model, held_out, measure)["loss"]]
        for batch in loader:
            run.backward(squared(model, batch))
            optimizer.step()
            if not run.in_batch:
                found.append(run.evaluate(model, held_out, measure)["loss"])
        return found

    case = Case(lambda: Perceptron().double(), data, squared)
    model, optimizer = made()
    whole = torch.utils.data.default_collate(held_out)
    expected = [float(squared(model, whole).detach())]
    for batch in case.batches():
        squared(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(squared(model, whole).detach()))
    for cut in (PAIR, ALONE):
        for found in in_runs(len(cut["batch"]), each, stage=stage, **cut, **UNITS):
            assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_logs_are_means_by_weight_of_each_step(when: str) -> None:
    """Whether they come before `run.backward`, after it, or after the step."""
    data = numbered(12)

    def each(run: Run) -> list[tuple[int, dict[str, float]]]:
        model, optimizer = made()
        _, optimizer, loader = run.prepare(model, optimizer, data, shuffle=False)
        for _ in run.epochs(1):
            for batch in loader:
                weight = float((batch[2] + 1).sum())
                figure = float((batch[2].double() * (batch[2] + 1)).sum()) / weight
                if when == "before":
                    run.log(number=figure)
                run.backward(squared(model, batch[:2]), weight=weight)
                if when == "after":
                    run.log(number=figure)
                optimizer.step()
                if when == "later":
                    run.log(number=torch.tensor(figure, dtype=torch.float64))
        return run.history

    def mean(step: int) -> float:
        numbers = range(5 * step, min(12, 5 * step + 5))
        return sum(number * (number + 1) for number in numbers) / sum(number + 1 for number in numbers)

    for cut in (THREE, ALONE):
        for history in in_runs(len(cut["batch"]), each, stage=1, **cut):
            assert [step for step, _ in history] == [0, 1, 2]
            assert [means["number"] for _, means in history] == pytest.approx([mean(0), mean(1), mean(2)], abs=1e-10)


@in_stages
def test_stats_show_who_is_slow(stage: int) -> None:
    def each(run: Run) -> list[Any]:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        _, optimizer, loader = run.prepare(model, optimizer, vectors(20), loss=squared)
        time.sleep(0.1)
        for batch in loader:
            if run.rank == 1:
                time.sleep(0.05)
            run.backward(squared(model, batch))
            optimizer.step()
        return run.stats()

    fast, slow = in_runs(2, each, stage=stage, batch=[2, 2], **UNITS)
    assert len(fast) == len(slow) == 5
    # The usual step: a busy machine may hold up any one.
    assert usual(slow, "compute_s") > 0.045
    assert usual(slow, "waiting_s") < 0.03
    assert usual(fast, "waiting_s") > 0.03
    assert usual(fast, "compute_s") < 0.045
    for quick, late in zip(fast[1:], slow[1:], strict=True):
        for step in (quick, late):
            parts = step.compute_s + step.communication_s + step.waiting_s + step.data_s
            assert parts == pytest.approx(step.seconds, rel=0.02)
            assert step.samples == 2
            assert step.moved_bytes
            assert step.memory_bytes["optimizer"] > 0
            assert step.memory_bytes.get("units in flight", 0) == 0
    assert fast[0].seconds < 0.1


def usual(stats: list[Any], name: str) -> float:
    return float(statistics.median(getattr(step, name) for step in stats[1:]))


@in_stages
def test_state_dicts(stage: int) -> None:
    data = vectors(10)
    case = Case(lambda: Perceptron().double(), data, squared, lambda params: torch.optim.SGD(params, 0.1))
    expected = in_one(case).state

    def each(run: Run) -> None:
        model, _ = made()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            [each for each in model.parameters() if each.requires_grad], 0.1
        )
        _, optimizer, loader = run.prepare(model, optimizer, data, shuffle=False)
        for batch in loader:
            run.backward(squared(model, batch))
            optimizer.step()
        same(run.full_state_dict(model), expected, 1e-10)
        if stage < 3:
            same(model.state_dict(), expected, 1e-10)
        else:
            assert all(each.isnan().all() for each in model.parameters())
            assert sum(each.numel() for each in model.parameters()) == sum(map(torch.numel, expected.values()))

    in_runs(3, each, stage=stage, **THREE, **UNITS)


@in_stages
@pytest.mark.parametrize("cut", [PAIR, THREE], ids=["all have data", "one has none"])
def test_leaving_the_loop_at_the_end_of_a_batch(cut: dict[str, Any], stage: int) -> None:
    """Ranks without data leave with the others, and all go on with the next epoch."""

    def each(run: Run) -> tuple[int, int, list[float], dict[str, torch.Tensor]]:
        model, optimizer = made()
        halving = StepLR(optimizer, 1, 0.5)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(20), halving, shuffle=False)
        for _ in run.epochs(3):
            for batch in loader:
                found = squared(model, batch)
                run.backward(found)
                optimizer.step()
                scheduler.step()
                run.log(loss=found)
                if run.step % 2 == 0 and not run.in_batch:
                    break
        return (
            run.step,
            run.position.epoch,
            [group["lr"] for group in optimizer.param_groups],
            run.full_state_dict(model),
        )

    model, optimizer = made()
    scheduler = StepLR(optimizer, 1, 0.5)
    batches = Case(lambda: model, vectors(20), squared).batches()
    for _ in range(3):
        for batch in batches[:2]:
            squared(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for steps, epoch, rates, state in in_runs(len(cut["batch"]), each, stage=stage, **cut, **UNITS):
        assert (steps, epoch) == (6, 3)
        assert rates == [group["lr"] for group in optimizer.param_groups]
        same(state, model.state_dict(), 1e-10)


def test_a_loader_that_is_kept_does_not_keep_others_waiting() -> None:
    def each(run: Run) -> list[int]:
        model, optimizer = made()
        _, optimizer, loader = run.prepare(model, optimizer, vectors(20), shuffle=False)
        kept = []
        for _ in run.epochs(2):
            kept.append(iter(loader))
            for batch in kept[-1]:
                run.backward(squared(model, batch))
                optimizer.step()
                if run.step % 2 == 0 and not run.in_batch:
                    break
        return [run.step]

    assert in_runs(3, each, stage=1, **THREE) == [[4]] * 3


@in_stages
def test_learning_rates_set_by_hand(stage: int) -> None:
    """A rank without data does not run the body of the loop, and steps with them all the same."""

    def each(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = made()
        _, optimizer, loader = run.prepare(model, optimizer, vectors(20), shuffle=False)
        for batch in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (run.step + 1)
            run.backward(squared(model, batch))
            optimizer.step()
        return run.full_state_dict(model)

    model, optimizer = made()
    for number, batch in enumerate(Case(lambda: model, vectors(20), squared).batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        squared(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for state in in_runs(3, each, stage=stage, **THREE, **UNITS):
        same(state, model.state_dict(), 1e-10)


@in_stages
@pytest.mark.parametrize("how", ["a scheduler", "before a step", "after a step"])
def test_rates_where_ranks_come_and_go(how: str, stage: int) -> None:
    """As plans may have it: a rank has no data for a while, or just where the other has some."""
    changes = {1: ((4,), ()), 2: ((), (4,)), 3: ((4,), ()), 4: ((1, 1), (2,))}

    def set_rates(optimizer: torch.optim.Optimizer, step: int, when: str) -> None:
        if how == when:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)

    def each(run: Run) -> dict[str, torch.Tensor]:
        model, optimizer = made()
        halving = StepLR(optimizer, 1, 0.5)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(20), halving, shuffle=False)
        for number, micro in changes.items():
            run._prepared().source.change_split(Split(micro), DataPosition(0, number))
        for batch in loader:
            set_rates(optimizer, run.step, "before a step")
            run.backward(squared(model, batch))
            optimizer.step()
            if how == "a scheduler":
                scheduler.step()
            if not run.in_batch:
                set_rates(optimizer, run.step, "after a step")
        return run.full_state_dict(model)

    model, optimizer = made()
    scheduler = StepLR(optimizer, 1, 0.5)
    for step, batch in enumerate(Case(lambda: model, vectors(20), squared, size=4).batches()):
        set_rates(optimizer, step, "before a step")
        squared(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if how == "a scheduler":
            scheduler.step()
        set_rates(optimizer, step + 1, "after a step")
    for state in in_runs(2, each, stage=stage, batch=[2, 2], **UNITS):
        same(state, model.state_dict(), 1e-10)


def test_schedulers_by_epoch_and_by_a_figure() -> None:
    """After the loop over the loader, which all ranks come by."""

    def each(run: Run) -> list[float]:
        model, optimizer = made()
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        _, optimizer, loader, scheduler = run.prepare(model, optimizer, vectors(15), plateau)
        for _ in run.epochs(3):
            for batch in loader:
                run.backward(squared(model, batch))
                optimizer.step()
            run.evaluate(model, vectors(5), lambda model, batch: {"loss": squared(model, batch)})
            scheduler.step(1.0)
        return [group["lr"] for group in optimizer.param_groups]

    for rates in in_runs(3, each, stage=2, **THREE):
        assert rates == pytest.approx([0.0005, 0.0002])


def test_a_copy_of_a_model_with_batch_norm() -> None:
    """As for an average of weights. A bias before the norm would not learn."""

    def each(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        _, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), vectors(15), loss=squared)
        clone = copy.deepcopy(model)
        for batch in loader:
            run.backward(squared(model, batch))
            optimizer.step()
        for mine, theirs in zip(clone.parameters(), model.parameters(), strict=True):
            assert mine is not theirs
            assert not torch.equal(mine, theirs)

    in_runs(2, each, stage=1, batch=[3, 2])
