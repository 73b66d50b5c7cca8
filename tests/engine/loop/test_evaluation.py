"""`run.evaluate`: every sample counts once, and what is not the same on all ranks is refused."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, STAGES, THREE, UNIT_BYTES
from support.models import cross_entropy, seeded_perceptron, vectors
from support.runs import in_runs
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from mimatrix.core.errors import UserError
from mimatrix.engine.run import Run

Act = Callable[[Run, nn.Module], Any]


class SampleStream(IterableDataset[Any]):
    """Samples in order, without a length."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def loader(samples: Any, *arguments: Any, **settings: Any) -> Any:
    return DataLoader(samples, *arguments, **settings)


def measure(model: nn.Module, batch: Any) -> dict[str, Any]:
    correct = model(batch[0]).argmax(1) == batch[1]
    return {"loss": cross_entropy(model, batch), "accuracy": correct.double().mean()}


def measure_once(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": cross_entropy(model, batch)}


def plain_loss(samples: list[Any]) -> float:
    """Return the mean loss over samples, computed one by one."""
    model, _ = seeded_perceptron()
    model.eval()
    with torch.no_grad():
        return sum(float(cross_entropy(model, (x[None], torch.as_tensor(y)[None]))) for x, y in samples) / len(samples)


def on_ranks(split: dict[str, Any], act: Act, **settings: Any) -> list[Any]:
    """Return what `act` returns on each rank, or the error that it raises there."""

    def on_rank(run: Run) -> Any:
        model, optimizer = seeded_perceptron()
        run.prepare(model, optimizer, vectors(10))
        try:
            return act(run, model)
        except UserError as error:
            return str(error)

    return in_runs(len(split["batch"]), on_rank, unit_bytes=UNIT_BYTES, **{**split, **settings})


@pytest.mark.parametrize("split", [ALONE, PAIR, THREE], ids=["alone", "pair", "three"])
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_is_exact_for_datasets_of_every_size_and_kind(stage: int, split: dict[str, Any]) -> None:
    """Smaller than the number of ranks, than a global batch, and not divisible by it."""
    sizes = (1, 2, 4, 5, 13)
    expected = [plain_loss(vectors(size)) for size in sizes for _ in range(3)]

    def act(run: Run, model: nn.Module) -> list[float]:
        return [
            run.evaluate(model, kind(vectors(size)), measure_once)["loss"]
            for size in sizes
            for kind in (list, SampleStream, lambda samples: loader(samples, batch_size=3, shuffle=True))
        ]

    for losses in on_ranks(split, act, stage=stage):
        assert losses == pytest.approx(expected, abs=1e-10)


def unlike(one: Any, other: Any) -> Callable[[Run], Any]:
    return lambda run: one if run.rank == 0 else other


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (unlike(vectors(300), vectors(184)), "rank 1 evaluates a dataset of 184 samples and rank 0 one of 300 samples"),
        (unlike(SampleStream(vectors(9)), vectors(9)), "rank 1 evaluates a dataset of 9 samples and rank 0 a stream"),
        (
            unlike(loader(vectors(9), batch_size=5), loader(vectors(10), batch_size=5)),
            "rank 1 evaluates a dataset of 10 samples and rank 0 one of 9 samples",
        ),
        (
            unlike(loader(vectors(9), shuffle=True), loader(vectors(9))),
            "rank 1 evaluates with shuffle=False and rank 0 with shuffle=True",
        ),
        (
            unlike(loader(vectors(9), 5), loader(vectors(9), 5, drop_last=True)),
            "rank 1 evaluates with drop_last=True and rank 0 with drop_last=False",
        ),
        (unlike(vectors(9), []), "rank 1: run.evaluate was given a dataset without samples; give it at least one"),
        (unlike(vectors(9), 5), "rank 1: int is not a dataset; give it __len__ and __getitem__"),
    ],
)
def test_unlike_datasets_are_refused_on_all_ranks_before_anything_is_read(
    dataset: Callable[[Run], Any], sentence: str
) -> None:
    def act(run: Run, model: nn.Module) -> Any:
        return run.evaluate(model, dataset(run), lambda *_: pytest.fail("the metric function was called"))

    for error in on_ranks(PAIR, act):
        assert error.startswith(sentence)


def test_unlike_loaders_are_refused_in_prepare_by_their_samples() -> None:
    def on_rank(run: Run) -> str:
        model, optimizer = seeded_perceptron()
        with pytest.raises(UserError) as raised:
            run.prepare(model, optimizer, loader(vectors(9 + run.rank), batch_size=5))
        return str(raised.value)

    for error in in_runs(2, on_rank, **PAIR):
        assert "a dataset of 9 samples" in error
        assert "a dataset of 10 samples" in error


def test_a_loader_is_evaluated_in_batches_as_large_as_in_training() -> None:
    """Its length is in batches, not in samples."""
    sizes: list[int] = []

    def count(model: nn.Module, batch: Any) -> dict[str, Any]:
        sizes.append(len(batch[0]))
        return {"one": 1.0}

    on_ranks({"batch": [10]}, lambda run, model: run.evaluate(model, loader(vectors(30), 15), count))
    assert sizes == [10, 10, 10]


@pytest.mark.parametrize("split", [ALONE, PAIR], ids=["alone", "pair"])
@pytest.mark.parametrize("batch_size", [4, 5, 7, 13])
def test_drop_last_leaves_out_what_the_loader_itself_leaves_out(split: dict[str, Any], batch_size: int) -> None:
    samples = vectors(13)
    expected = plain_loss(samples[: 13 // batch_size * batch_size])

    def act(run: Run, model: nn.Module) -> float:
        return run.evaluate(model, loader(samples, batch_size, drop_last=True), measure)["loss"]

    assert on_ranks(split, act) == pytest.approx([expected] * len(split["batch"]), abs=1e-10)


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (
            loader(vectors(3), 4, drop_last=True),
            "the DataLoader has 3 samples, fewer than its batch_size = 4, and drop_last leaves them out; leave",
        ),
        (
            loader(SampleStream(vectors(9)), 4, drop_last=True),
            "the DataLoader of a stream has drop_last=True and batch_size = 4, but the stream is read in global "
            "batches of 5; leave drop_last out",
        ),
    ],
)
def test_loaders_that_drop_what_an_evaluation_cannot_are_refused(dataset: Any, sentence: str) -> None:
    (error,) = on_ranks(ALONE, lambda run, model: run.evaluate(model, dataset, measure))
    assert error.startswith(sentence)


class Wrapper(nn.Module):
    """Around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.own = model, nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


class ScaledOutput(nn.Module):
    """Has a buffer alone."""

    scale: torch.Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return x[:, :3] * self.scale


@pytest.mark.parametrize("stage", [0, 2])
def test_models_around_the_prepared_one_and_averages_of_it_are_evaluated(stage: int) -> None:
    def act(run: Run, model: nn.Module) -> list[float]:
        average = AveragedModel(model)
        average.update_parameters(model)
        given = [model, Wrapper(model), copy.deepcopy(model), average, nn.Identity(), ScaledOutput(2.0)]
        return [run.evaluate(one, vectors(9), measure)["loss"] for one in given]

    first, second = on_ranks(PAIR, act, stage=stage)
    assert first == second
    assert first[:4] == pytest.approx([plain_loss(vectors(9))] * 4, abs=1e-10)


def linear_of(rank: int) -> nn.Module:
    model = nn.Linear(6, 3).double()
    nn.init.constant_(model.weight, 1.0 + rank)
    return model


NOT_PREPARED = (
    "run.evaluate was given a model that was not prepared, and rank 1 has other weights of it than rank 0; give it the "
    "prepared model, or one with the same weights on all ranks"
)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (lambda rank, _: linear_of(rank), NOT_PREPARED),
        (lambda rank, _: ScaledOutput(1.0 + rank), NOT_PREPARED),
        (lambda rank, _: nn.Linear(6, 3 + rank).double(), NOT_PREPARED),
        (
            lambda rank, model: linear_of(0) if rank else model,
            "rank 0 evaluates the prepared model and rank 1 another one; give run.evaluate the same on all ranks",
        ),
    ],
    ids=["weights", "buffers", "shapes", "another"],
)
def test_a_model_that_was_not_prepared_and_differs_is_refused(other: Any, sentence: str) -> None:
    def act(run: Run, model: nn.Module) -> Any:
        return run.evaluate(other(run.rank, model), vectors(9), measure)

    assert on_ranks(PAIR, act) == [sentence] * 2


def differs_by_rank(run: Run) -> Callable[..., dict[str, Any]]:
    return measure if run.rank == 0 else measure_once


@pytest.mark.parametrize(
    ("metric_fn", "sentence"),
    [
        (
            differs_by_rank,
            "the metric function of run.evaluate returned accuracy, loss on rank 0 and loss on rank 1; return the same",
        ),
        (lambda _: lambda *_: {"v": torch.ones(3)}, 'the metric "v" of run.evaluate is a Tensor of shape [3]; '),
        (lambda _: lambda *_: {"v": None}, 'the metric "v" of run.evaluate is None; give a number or a tensor'),
        (lambda _: lambda *_: {"v": "high"}, "the metric \"v\" of run.evaluate is the string 'high'; give a"),
        (lambda _: lambda *_: 0.5, "the metric function of run.evaluate returned a float; return a dict of numbers by"),
        (lambda _: lambda *_: {"v": 1.0, "weight": -1}, "the metric function of run.evaluate returned weight = -1.0;"),
    ],
)
def test_what_a_metric_function_must_not_return_is_told_in_a_sentence(
    metric_fn: Callable[[Run], Any], sentence: str
) -> None:
    for error in on_ranks(PAIR, lambda run, model: run.evaluate(model, vectors(9), metric_fn(run))):
        assert error.removeprefix("rank 0: ").startswith(sentence)


@pytest.mark.parametrize("split", [ALONE, PAIR], ids=["alone", "pair"])
def test_a_batch_of_weight_0_counts_nothing_even_if_its_mean_is_nan(split: dict[str, Any]) -> None:
    """As the mean over tokens of samples that have none."""

    def mean(model: nn.Module, batch: Any) -> dict[str, Any]:
        counted = batch[1][batch[1] > 0].double()
        return {"label": counted.mean(), "weight": len(counted)}

    labels = [label for _, label in vectors(13) if label]
    for means in on_ranks({**split, "micro_batch": 1}, lambda run, model: run.evaluate(model, vectors(13), mean)):
        assert means["label"] == pytest.approx(sum(labels) / len(labels), abs=1e-12)


@pytest.mark.parametrize("split", [ALONE, PAIR], ids=["alone", "pair"])
def test_an_empty_stream_is_told_from_one_that_is_too_short(split: dict[str, Any]) -> None:
    for error in on_ranks(split, lambda run, model: run.evaluate(model, SampleStream([]), measure)):
        assert error == "the dataset has no samples; give one that has some"


def test_names_that_differ_between_batches_are_refused_on_one_rank_too() -> None:
    names = iter("abc")

    def act(run: Run, model: nn.Module) -> Any:
        return run.evaluate(model, vectors(15), lambda *_: {next(names): 1.0})

    (error,) = on_ranks({"batch": [5]}, act)
    assert error.startswith("the metric function of run.evaluate returned a for one batch and b for another; return")


def test_a_metric_function_that_fails_on_one_rank_fails_on_all() -> None:
    def act(run: Run, model: nn.Module) -> Any:
        try:
            return run.evaluate(model, vectors(9), lambda *_: {"v": 1 / run.rank})
        except ZeroDivisionError:
            return "division"

    assert on_ranks(PAIR, act) == ["division", "rank 0: ZeroDivisionError: division by zero"]
