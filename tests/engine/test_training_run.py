"""What `Run` offers around the loop: `evaluate`, `log` and `history`, `stats`, `full_state_dict`."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, THREE, TrainingCase, assert_same, train_alone
from support.models import Perceptron, cross_entropy, seeded_perceptron, vectors
from support.runs import in_runs
from torch import nn
from torch.utils.data import DataLoader

from mimatrix.core.errors import UserError
from mimatrix.engine.mode import Membership
from mimatrix.engine.prepare import PrepareInputs
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World

in_stages = pytest.mark.parametrize("stage", range(4))
UNITS: dict[str, Any] = {"unit_bytes": 300}


def numbered(count: int) -> list[Any]:
    return [(x, y, number) for number, (x, y) in enumerate(vectors(count))]


@pytest.mark.parametrize(("samples", "stage"), [(1, 3), (2, 2), (13, 0), (13, 3)])
def test_evaluation_sees_every_sample_once(samples: int, stage: int) -> None:
    seen: list[int] = []

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        assert not model.training
        seen.extend(batch[2].tolist())
        loss = cross_entropy(model, batch[:2])
        return {"loss": loss, "twice": 2 * loss, "weight": float((batch[2] + 1).sum())}

    def on_rank(run: Run) -> dict[str, float]:
        model, optimizer = seeded_perceptron()
        run.prepare(model, optimizer, vectors(15))
        model.frozen.eval()
        means = run.evaluate(model, numbered(samples), measure)
        assert model.training
        assert not model.frozen.training
        return means

    results = in_runs(3, on_rank, stage=stage, **THREE, **UNITS)
    assert Counter(seen) == Counter(range(samples))
    assert all(means == results[0] for means in results)
    assert results[0]["twice"] == pytest.approx(2 * results[0]["loss"], abs=1e-12)


@in_stages
def test_evaluation_is_exact_in_the_middle_of_training(stage: int) -> None:
    """At the boundary of a batch, and by samples: as in one process."""
    data, held_out = vectors(15), vectors(7)

    def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": cross_entropy(model, batch)}

    def on_rank(run: Run) -> list[float]:
        model, optimizer = seeded_perceptron()
        _, optimizer, loader = run.prepare(model, optimizer, data, shuffle=False)
        losses = [run.evaluate(model, held_out, measure)["loss"]]
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
            if not run.in_batch:
                losses.append(run.evaluate(model, held_out, measure)["loss"])
        return losses

    case = TrainingCase(lambda: Perceptron().double(), data, cross_entropy)
    model, optimizer = seeded_perceptron()
    whole = torch.utils.data.default_collate(held_out)
    expected = [float(cross_entropy(model, whole).detach())]
    for batch in case.batches():
        cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(cross_entropy(model, whole).detach()))
    for split in (PAIR, ALONE):
        for losses in in_runs(len(split["batch"]), on_rank, stage=stage, **split, **UNITS):
            assert losses == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_history_has_weighted_means_of_each_step(when: str) -> None:
    """Whether they come before `run.backward`, after it, or after the step."""
    data = numbered(12)

    def on_rank(run: Run) -> list[tuple[int, dict[str, float]]]:
        model, optimizer = seeded_perceptron()
        _, optimizer, loader = run.prepare(model, optimizer, data, shuffle=False)
        for _ in run.epochs(1):
            for batch in loader:
                weight = float((batch[2] + 1).sum())
                figure = float((batch[2].double() * (batch[2] + 1)).sum()) / weight
                if when == "before":
                    run.log(number=figure)
                run.backward(cross_entropy(model, batch[:2]), weight=weight)
                if when == "after":
                    run.log(number=figure)
                optimizer.step()
                if when == "later":
                    run.log(number=torch.tensor(figure, dtype=torch.float64))
        return run.history

    def mean(step: int) -> float:
        numbers = range(5 * step, min(12, 5 * step + 5))
        return sum(number * (number + 1) for number in numbers) / sum(number + 1 for number in numbers)

    for split in (THREE, ALONE):
        for history in in_runs(len(split["batch"]), on_rank, stage=1, **split):
            assert [step for step, _ in history] == [0, 1, 2]
            assert [means["number"] for _, means in history] == pytest.approx([mean(0), mean(1), mean(2)], abs=1e-10)


@in_stages
def test_stats_show_which_rank_is_slow(stage: int) -> None:
    def on_rank(run: Run) -> list[Any]:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        _, optimizer, loader = run.prepare(model, optimizer, vectors(20), loss=cross_entropy)
        time.sleep(0.5)
        for batch in loader:
            if run.rank == 1:
                time.sleep(0.05)
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        return run.stats()

    fast, slow = in_runs(2, on_rank, stage=stage, batch=[2, 2], **UNITS)
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
    assert fast[0].seconds < 0.5, "what comes before the loop is in no step"


def usual(stats: list[Any], name: str) -> float:
    return float(statistics.median(getattr(step, name) for step in stats[1:]))


@in_stages
def test_full_state_dict_is_exact(stage: int) -> None:
    data = vectors(10)
    case = TrainingCase(lambda: Perceptron().double(), data, cross_entropy, lambda params: torch.optim.SGD(params, 0.1))
    expected = train_alone(case).state

    def on_rank(run: Run) -> None:
        model, _ = seeded_perceptron()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            [param for param in model.parameters() if param.requires_grad], 0.1
        )
        _, optimizer, loader = run.prepare(model, optimizer, data, shuffle=False)
        for batch in loader:
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        assert_same(run.full_state_dict(model), expected, 1e-10)
        if stage < 3:
            assert_same(model.state_dict(), expected, 1e-10)
        else:
            for param in model.parameters():
                with pytest.raises(UserError, match="stage 3 has sharded it over the ranks"):
                    param.isnan()
            assert sum(param.numel() for param in model.parameters()) == sum(map(torch.numel, expected.values()))

    in_runs(3, on_rank, stage=stage, **THREE, **UNITS)


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """A stream, which does not know its length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


def test_evaluation_takes_a_loader_of_a_stream() -> None:
    run = Run(Membership(World.join(Settings(global_batch=4, quiet=True))))
    loader = DataLoader(Numbers(), batch_size=2)
    means = run.evaluate(nn.Identity(), loader, lambda model, batch: {"mean": model(batch).mean()})
    assert means == {"mean": pytest.approx(2.5)}


def test_evaluation_refuses_weights_that_sum_to_zero() -> None:
    run = Run(Membership(World.join(Settings(global_batch=4, quiet=True))))
    with pytest.raises(UserError, match="the weights of accuracy sum to 0"):
        run.evaluate(nn.Identity(), vectors(4), lambda *_: {"accuracy": 1.0, "weight": 0})


def test_prepare_takes_names() -> None:
    run = Run(Membership(World.join(Settings(global_batch=4, quiet=True))))
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _, loader = run.prepare(model=model, optimizer=optimizer, dataset=vectors(4))
    assert prepared is model
    assert len(loader) == 1


def test_prepared_objects_can_be_prepared_again_after_close() -> None:
    """They are unwrapped: a wrapper around a wrapper would wait for a run that is closed."""
    model = nn.Linear(6, 3).double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    original = (optimizer, scheduler)
    for _ in range(2):
        run = Run(Membership(World.join(Settings(global_batch=4, quiet=True))))
        _, prepared, _, synced = run.prepare(model, optimizer, vectors(4), scheduler)
        assert (prepared.optimizer, synced.scheduler) == original
        run.close()
        optimizer, scheduler = prepared, synced


def test_a_mode_is_settled_once_also_if_preparing_fails() -> None:
    world = World.join(Settings(global_batch=4, quiet=True))
    settled: list[World] = []

    class Undecided(Membership):
        def settle(self, inputs: PrepareInputs) -> World:
            inputs.open(world)
            settled.append(world.with_settings(world.settings))
            return settled[-1]

    run = Run(Undecided(world))
    model, other = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    with pytest.raises(UserError, match="not parameters of the model"):
        run.prepare(model, torch.optim.SGD(other.parameters(), lr=0.1), vectors(4))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), vectors(4))
    assert len(settled) == 1
