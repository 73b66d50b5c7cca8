"""Streams of ranks: each rank's own counted exactly, or the same on all ranks and checked."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.features import STAGES, UNIT_BYTES, assert_same
from support.models import Perceptron, Residual, adamw, cross_entropy, images, vectors
from support.plain import plain_run
from support.runs import in_runs
from support.streams import FilesOfRanks, ShardedStream, ShuffledStream
from torch import nn
from torch.utils.data import default_collate

from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.loop.batch_agreement import BatchAgreement
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.run import Run
from mimatrix.planner import Split

pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\) may lead:DeprecationWarning")

SPLITS: dict[int, dict[str, Any]] = {
    1: {"batch": [5], "micro_batch": 2},
    2: {"batch": [3, 2], "micro_batch": [1, 2], "shares": [0.7, 0.3]},
    3: {"batch": [1, 3, 2], "micro_batch": [1, 2, 1], "shares": [0.2, 0.8, 0.0]},
}
FILES: dict[int, list[list[int]]] = {
    1: [[*range(13)]],
    2: [[*range(10)], [*range(10, 23)]],
    3: [[*range(7)], [*range(7, 12)], [*range(12, 23)]],
}
"""Samples of each rank: they end at different times, in the middle of a global batch."""
DATA = vectors(30)


def samples_of(numbers: Sequence[Sequence[int]]) -> list[list[Any]]:
    return [[DATA[number] for number in row] for row in numbers]


def expected_batches(files: Sequence[Sequence[int]], shares: Sequence[int], *, drop_last: bool = False) -> list[Any]:
    """Return what all ranks take together, global batch by global batch."""
    batches, position = [], 0
    while any(position * share < len(rows) for rows, share in zip(files, shares, strict=True)):
        parts = [rows[position * share : (position + 1) * share] for rows, share in zip(files, shares, strict=True)]
        position += 1
        if drop_last and any(len(part) < share for part, share in zip(parts, shares, strict=True)):
            break
        batches.append([number for part in parts for number in part])
    return batches


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Perceptron().double()
    return model, adamw(model)


def train(
    run: Run,
    built: tuple[nn.Module, torch.optim.Optimizer],
    dataset: Any,
    epochs: int = 2,
    each_batch: Callable[[Any], None] = lambda batch: None,
    load: Path | None = None,
    **loading: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer, loader = run.prepare(*built, dataset, loss=cross_entropy, **loading)
    if load:
        assert run.load(load)
    for _ in run.epochs(epochs):
        for batch in loader:
            loss = cross_entropy(model, batch)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            each_batch(batch)
    return run.full_state_dict(model), [means["loss"] for _, means in run.history]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_self_sharded_streams_train_as_a_plain_loop_on_their_union(ranks: int, stage: int) -> None:
    files, built = FILES[ranks], [build() for _ in range(ranks)]
    batches = expected_batches(files, SPLITS[ranks]["batch"])
    assert sorted(number for batch in batches for number in batch) == list(range(sum(map(len, files))))
    model, optimizer = build()
    collated = [default_collate([DATA[number] for number in batch]) for batch in batches]
    losses = [loss for _ in range(2) for loss in plain_run(model, optimizer, collated, cross_entropy)]

    def on_rank(run: Run) -> tuple[dict[str, torch.Tensor], list[float]]:
        return train(run, built[run.rank], FilesOfRanks(samples_of(files), run.rank), stream_per_rank=True)

    for state, own_losses in in_runs(ranks, on_rank, stage=stage, unit_bytes=UNIT_BYTES, **SPLITS[ranks]):
        assert_same(state, model.state_dict(), 1e-10)
        assert own_losses == pytest.approx(losses, abs=1e-10)


def seen_on_ranks(ranks: int, dataset: Callable[[Run], Any], epochs: int = 1, **loading: Any) -> list[list[int]]:
    """Return the numbers of the samples that each rank trained on, in order."""
    built = [build() for _ in range(ranks)]

    def on_rank(run: Run) -> list[int]:
        seen: list[int] = []
        train(run, built[run.rank], dataset(run), epochs, seen_by(seen), **loading)
        return seen

    return in_runs(ranks, on_rank, **SPLITS[ranks])


def find(sample: Any) -> int:
    return next(number for number, other in enumerate(DATA) if torch.equal(other[0], sample[0]))


def seen_by(seen: list[int]) -> Callable[[Any], None]:
    return lambda batch: seen.extend(find(sample) for sample in zip(*batch, strict=True))


def test_every_sample_of_every_rank_is_used_once_in_an_epoch() -> None:
    files = samples_of(FILES[2])
    seen = seen_on_ranks(2, lambda run: FilesOfRanks(files, run.rank), stream_per_rank=True)
    assert [sorted(numbers) for numbers in seen] == FILES[2]


def test_drop_last_ends_the_epoch_with_the_first_stream_that_ends() -> None:
    files = samples_of(FILES[2])
    seen = seen_on_ranks(2, lambda run: FilesOfRanks(files, run.rank), stream_per_rank=True, drop_last=True)
    assert seen == [FILES[2][0][:9], FILES[2][1][:6]]
    assert len(expected_batches(FILES[2], [3, 2], drop_last=True)) == 3


def test_streams_that_end_at_different_times_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    built, files = [build() for _ in range(2)], samples_of(FILES[2])

    def on_rank(run: Run) -> None:
        train(run, built[run.rank], FilesOfRanks(files, run.rank), 1, stream_per_rank=True)

    with caplog.at_level(logging.INFO, "mimatrix.engine.loop.batch_agreement"):
        in_runs(2, on_rank, own=lambda _: {"quiet": False}, **SPLITS[2])
    lines = [line for line in caplog.messages if "has ended" in line]
    assert lines == [
        "the stream of rank 0 has ended at global batch 4 of epoch 0, before those of other ranks; global batches are "
        "smaller from then on"
    ]


DIFFERS = (
    "rank 1 reads other samples from the stream than rank 0: it is sharded or shuffled by rank; give {} "
    "stream_per_rank=True to train on each rank's own stream, or stream_per_rank=False if only random augmentation "
    "differs"
)


@pytest.mark.parametrize(
    "dataset",
    [
        lambda rank: ShardedStream(DATA, rank, 2),
        lambda rank: ShuffledStream(DATA, rank),
        lambda rank: ShardedStream(DATA[: 12 + 5 * rank]),
    ],
    ids=["sharded", "shuffled", "shorter"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_streams_that_differ_are_refused_on_all_ranks(dataset: Callable[[int], Any], stage: int) -> None:
    built = [build() for _ in range(2)]

    def on_rank(run: Run) -> str:
        before = run.step
        with pytest.raises(UserError) as caught:
            train(run, built[run.rank], dataset(run.rank))
        assert run.step in (before, 2)
        return str(caught.value)

    assert in_runs(2, on_rank, stage=stage, **SPLITS[2]) == [DIFFERS.format("run.prepare")] * 2


def test_streams_that_differ_are_refused_before_the_first_step() -> None:
    built = [build() for _ in range(2)]
    start = {name: value.clone() for name, value in built[0][0].state_dict().items()}

    def on_rank(run: Run) -> None:
        with pytest.raises(UserError, match="sharded or shuffled by rank"):
            train(run, built[run.rank], ShardedStream(DATA, run.rank, 2))
        assert run.step == 0

    in_runs(2, on_rank, **SPLITS[2])
    assert_same(built[0][0].state_dict(), start, 0.0)


def test_a_stream_that_only_differs_by_augmentation_may_go_unchecked() -> None:
    def augmented(rank: int) -> ShardedStream:
        return ShardedStream([(inputs + 1e-3 * rank, label) for inputs, label in DATA])

    built = [build() for _ in range(2)]

    def on_rank(run: Run) -> int:
        train(run, built[run.rank], augmented(run.rank), 1, stream_per_rank=False)
        return run.step

    assert in_runs(2, on_rank, **SPLITS[2]) == [6, 6]


class ExchangeWithRankZero(RankExchange):
    """Rank 0 has one reader for a stream that all ranks share, and has come to its end."""

    def __init__(self) -> None:
        super().__init__(None)

    def all_gather(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"sizes": None, "samples": 0, "digest": "", "per_rank": False, "readers": 1}, dict(message)]


@pytest.mark.parametrize(
    ("loading", "sentence"),
    [
        (
            {"stream_per_rank": True},
            "rank 1 was given stream_per_rank=True and rank 0 False; give all ranks the same",
        ),
        (
            {"num_workers": 2},
            "rank 1 reads the stream with 2 loader processes and rank 0 with 1, which gives another order; give all "
            "ranks the same num_workers",
        ),
    ],
)
def test_ranks_that_read_streams_in_different_ways_are_refused(loading: dict[str, Any], sentence: str) -> None:
    source = MicroBatchSource(ShardedStream(DATA), Split.of([3, 2]), 1, **loading)
    agreement = BatchAgreement(source, ExchangeWithRankZero(), call="run.prepare", logs=False)
    with pytest.raises(UserError) as caught:
        agreement.agree(None, DataPosition(0, 3))
    assert str(caught.value) == sentence


def test_an_unchecked_stream_that_ends_early_on_a_rank_is_refused() -> None:
    built = [build() for _ in range(2)]

    def on_rank(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            train(run, built[run.rank], ShardedStream(DATA[: 15 - 2 * run.rank]), stream_per_rank=False)
        return str(caught.value)

    assert (
        in_runs(2, on_rank, **SPLITS[2])
        == [
            "the stream of rank 1 has 3 samples for this global batch and that of rank 0 5; let all ranks read the "
            "same, or give run.prepare stream_per_rank=True"
        ]
        * 2
    )


def test_batch_norm_sees_the_union_of_streams_of_ranks() -> None:
    """The stream of rank 0 ends first, so that it shadows the others' last steps."""
    data = images(23)
    files = [data[:9], data[9:]]
    built = [build_residual() for _ in range(2)]
    model, optimizer = build_residual()
    batches = expected_batches([[*range(9)], [*range(9, 23)]], [3, 2])
    plain_run(model, optimizer, [default_collate([data[n] for n in batch]) for batch in batches], cross_entropy)

    def on_rank(run: Run) -> dict[str, torch.Tensor]:
        return train(run, built[run.rank], FilesOfRanks(files, run.rank), 1, stream_per_rank=True)[0]

    for state in in_runs(2, on_rank, batch=[3, 2]):
        assert_same(state, model.state_dict(), 1e-10)


def build_residual() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Residual().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_rank_without_samples_may_not_have_its_own_stream() -> None:
    with pytest.raises(UserError, match="rank 1 has no samples in a global batch, so its own stream would not be read"):
        in_runs(2, lambda run: train(run, build(), ShardedStream(DATA), stream_per_rank=True), batch=[5, 0])


def test_streams_without_samples_are_refused() -> None:
    built = [build() for _ in range(2)]

    def on_rank(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            train(run, built[run.rank], ShardedStream([]), stream_per_rank=True)
        return str(caught.value)

    says = "the streams of all ranks have no samples; give run.prepare streams that have some"
    assert in_runs(2, on_rank, **SPLITS[2]) == [says] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_streams_of_ranks_that_are_the_same_are_refused(stage: int) -> None:
    built = [build() for _ in range(3)]

    def on_rank(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            train(run, built[run.rank], ShardedStream(DATA, run.rank % 2, 2), stream_per_rank=True)
        assert run.step == 0
        return str(caught.value)

    says = (
        "ranks 0 and 2 read the same samples from streams of their own, which would then be used several times; shard "
        "the stream by rank, or leave stream_per_rank out"
    )
    assert in_runs(3, on_rank, stage=stage, **SPLITS[3]) == [says] * 3


def test_a_stream_too_short_for_drop_last_is_refused() -> None:
    built = [build() for _ in range(2)]

    def on_rank(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            train(run, built[run.rank], ShardedStream(DATA[: 1 + 9 * run.rank]), stream_per_rank=True, drop_last=True)
        return str(caught.value)

    (first, second) = in_runs(2, on_rank, **SPLITS[2])
    assert first == second
    assert first.startswith("the stream of rank 0 does not fill its part of one global batch")


def test_own_streams_cannot_be_read_ahead() -> None:
    with pytest.raises(UserError, match="leave out either read_ahead or stream_per_rank"):
        in_runs(
            1, lambda run: train(run, build(), ShardedStream(DATA), stream_per_rank=True, read_ahead=True), batch=[5]
        )


# Evaluation


def mean_of(model: nn.Module, batch: Any) -> dict[str, Any]:
    model(batch[0])
    return {"label": batch[1].double().mean()}


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_counts_each_sample_of_each_ranks_stream_once(stage: int) -> None:
    built, files = [build() for _ in range(3)], samples_of(FILES[3])

    def on_rank(run: Run) -> dict[str, float]:
        model, _, _ = run.prepare(*built[run.rank], DATA)
        return run.evaluate(model, FilesOfRanks(files, run.rank), mean_of, stream_per_rank=True)

    labels = [float(DATA[number][1]) for numbers in FILES[3] for number in numbers]
    for means in in_runs(3, on_rank, stage=stage, unit_bytes=UNIT_BYTES, **SPLITS[3]):
        assert means["label"] == pytest.approx(sum(labels) / len(labels), abs=1e-12)


def test_evaluation_refuses_streams_that_differ() -> None:
    built = [build() for _ in range(2)]

    def on_rank(run: Run) -> str:
        model, _, _ = run.prepare(*built[run.rank], DATA)
        with pytest.raises(UserError) as caught:
            run.evaluate(model, ShardedStream(DATA, run.rank, 2), mean_of)
        return str(caught.value)

    says = DIFFERS.format("run.evaluate").replace("to train on each", "to evaluate each")
    assert in_runs(2, on_rank, **SPLITS[2]) == [says] * 2


# Resuming


# With loader processes on one rank only: a process that is forked on one thread while another one, here another rank,
# holds a lock of torch's never gets it. Ranks that are processes are in test_sharded_streams.py.
@pytest.mark.parametrize(
    ("ranks", "per_rank", "workers"),
    [(2, True, 0), (2, None, 0), (1, None, 2), pytest.param(1, True, 2, marks=pytest.mark.long)],
)
def test_a_resumed_stream_goes_on_with_exactly_the_rest(
    tmp_path: Path, ranks: int, per_rank: bool | None, workers: int
) -> None:
    loading: dict[str, Any] = {"stream_per_rank": per_rank, "num_workers": workers}

    def dataset(run: Run) -> ShardedStream:
        return ShardedStream(DATA, run.rank, run.world_size) if per_rank else ShardedStream(DATA)

    whole_built = [build() for _ in range(ranks)]

    def whole(run: Run) -> dict[str, torch.Tensor]:
        def save(_: Any) -> None:
            if not run.in_batch and run.step in (3, 10):
                run.save(tmp_path / f"at-{run.step}", wait=True)

        return train(run, whole_built[run.rank], dataset(run), 2, save, **loading)[0]

    expected = in_runs(ranks, whole, **SPLITS[ranks])[0]
    for step in (3, 10):
        resumed_built = [build() for _ in range(ranks)]

        def resumed(run: Run, step: int = step, built: Any = resumed_built) -> dict[str, torch.Tensor]:
            return train(run, built[run.rank], dataset(run), 2, load=tmp_path / f"at-{step}", **loading)[0]

        for state in in_runs(ranks, resumed, **SPLITS[ranks]):
            assert_same(state, expected, 1e-12)


def refusal_when_resumed(tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any], ranks: tuple[int, int]) -> str:
    def save(run: Run) -> None:
        def at_two(_: Any) -> None:
            if not run.in_batch and run.step == 2:
                run.save(tmp_path, wait=True)

        train(run, build(), of_rank(run, saved), 1, at_two, **saved)

    def load(run: Run) -> str:
        with pytest.raises(UserError) as caught:
            train(run, build(), of_rank(run, resumed), 1, load=tmp_path, **resumed)
        return str(caught.value)

    def of_rank(run: Run, loading: dict[str, Any]) -> ShardedStream:
        return ShardedStream(DATA, *((run.rank, run.world_size) if "stream_per_rank" in loading else ()))

    before, after = ranks
    in_runs(before, save, **SPLITS[before])
    (refusal,) = {*in_runs(after, load, **SPLITS[after])}
    return refusal


@pytest.mark.parametrize(
    ("saved", "resumed", "ranks", "sentence"),
    [
        (
            {"stream_per_rank": True},
            {"stream_per_rank": True},
            (2, 3),
            "the checkpoint is from the middle of an epoch in which each of 2 ranks read its own stream, and now there "
            "are 3; use as many ranks, or a checkpoint from an epoch's start",
        ),
        (
            {"stream_per_rank": True},
            {},
            (2, 2),
            "the checkpoint is from the middle of an epoch with stream_per_rank=True; use the same to resume it",
        ),
        (
            {"num_workers": 2},
            {"num_workers": 1},
            (1, 1),
            "the checkpoint is from the middle of an epoch of a stream read by 2 loader processes, and now there are "
            "1; use the same num_workers, or a checkpoint from an epoch's start",
        ),
    ],
)
def test_what_cannot_be_resumed_inside_an_epoch_is_refused(
    tmp_path: Path, saved: dict[str, Any], resumed: dict[str, Any], ranks: tuple[int, int], sentence: str
) -> None:
    assert refusal_when_resumed(tmp_path, saved, resumed, ranks) == sentence


def test_streams_of_ranks_resume_on_other_ranks_at_an_epochs_start(tmp_path: Path) -> None:
    built = [build() for _ in range(5)]

    def first(run: Run) -> None:
        train(run, built[run.rank], ShardedStream(DATA, run.rank, 2), 1, stream_per_rank=True)
        run.save(tmp_path, wait=True)

    def second(run: Run) -> list[int]:
        seen: list[int] = []
        dataset = ShardedStream(DATA, run.rank, 3)
        train(run, built[2 + run.rank], dataset, 2, seen_by(seen), load=tmp_path, stream_per_rank=True)
        return seen

    in_runs(2, first, **SPLITS[2])
    seen = Counter(number for numbers in in_runs(3, second, **SPLITS[3]) for number in numbers)
    assert seen == Counter(range(30))
