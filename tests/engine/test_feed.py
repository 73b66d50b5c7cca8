"""The feed: any number of ranks sees the same global batches, whatever loads them and wherever it goes on."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    get_worker_info,
)

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.data.source import DataPosition, MicroBatch, MicroBatchSource
from mimatrix.planner import Split

Batches = list[list[int]]
Seen = list[tuple[MicroBatch, Any]]
# Python 3.12 says so of any process with threads, such as a worker of pytest-xdist.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\) may lead:DeprecationWarning")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Stream(IterableDataset[int]):
    """0, 1, 2, ...; in epoch e from 100 * e on."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.first = 100 * epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.samples))


class Bare:
    """A stream that only iterates."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Rows(Dataset[int]):
    """Its row r is r; it is asked for many at once."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, rows: list[int]) -> list[int]:
        assert rows
        return rows


class InWorker(Dataset[int]):
    """Says what its worker was told."""

    told = -1

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> int:
        return self.told


def tell(worker: int) -> None:
    here = get_worker_info()
    assert here is not None
    assert isinstance(here.dataset, InWorker)
    here.dataset.told = 7


def split_of(total: int, data: st.DataObject, ranks: int | None = None) -> Split:
    """A random split of `total` samples; ranks may have none."""
    ranks = ranks or data.draw(st.integers(1, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    batches = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    return Split.of(batches, data.draw(st.integers(1, total)))


def union(seen: list[Seen], start: int = 0) -> Batches:
    """The global batches that ranks saw together, in order; checks that each Micro says what came with it."""
    batches: dict[int, list[int]] = defaultdict(list)
    for of_rank in seen:
        numbers = [micro.batch for micro, _ in of_rank]
        assert numbers == sorted(numbers)
        for micro, data in of_rank:
            check(micro, data, [other for other, _ in of_rank if other.batch == micro.batch])
            batches[micro.batch] += data.tolist() if data is not None else []
    for of_rank in seen:
        assert {micro.batch for micro, _ in of_rank} == set(batches)
        assert all(micro.total == len(batches[micro.batch]) for micro, _ in of_rank)
    assert sorted(batches) == list(range(start, start + len(batches)))
    return [batches[number] for number in sorted(batches)]


def check(micro: MicroBatch, data: torch.Tensor | None, siblings: list[MicroBatch]) -> None:
    assert (data is None) == (micro.count == 0) == (micro.samples == 0)
    assert data is None or len(data) == micro.samples
    assert [other.index for other in siblings] == list(range(max(1, micro.count)))
    assert [other.last for other in siblings] == [False] * (len(siblings) - 1) + [True]
    assert micro.count <= micro.rounds


def of_all(dataset: Any, split: Split, epoch: int = 0, start: int = 0, **options: Any) -> Batches:
    """What the ranks of `split` see together."""
    feeds = [MicroBatchSource(dataset, split, rank, **options) for rank in range(split.ranks)]
    return union([list(feed.epoch(epoch, start)) for feed in feeds], start)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_ranks_see_the_same_global_batches(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    samples = data.draw(st.integers(total, 40))
    options: dict[str, Any] = {"seed": data.draw(st.integers(0, 3)), "drop_last": data.draw(st.booleans())}
    epoch = data.draw(st.integers(0, 3))
    alone = of_all(range(samples), Split.of([total]), epoch, **options)
    assert of_all(range(samples), split_of(total, data), epoch, **options) == alone
    seen = list(chain(*alone))
    if options["drop_last"]:
        assert len(seen) == samples // total * total == len(set(seen))
    else:
        assert sorted(seen) == list(range(samples))
    assert [len(batch) for batch in alone[:-1]] == [total] * (len(alone) - 1)
    assert len(alone) == len(MicroBatchSource(range(samples), Split.of([total]), 0, **options))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_going_on_sees_exactly_the_rest(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 8))
    samples = data.draw(st.integers(total, 30))
    drop_last = data.draw(st.booleans())
    dataset = data.draw(st.sampled_from([range(samples), Stream(samples)]))
    whole = of_all(dataset, split_of(total, data), 2, drop_last=drop_last)
    start = data.draw(st.integers(0, len(whole)))
    assert of_all(dataset, split_of(total, data), 2, start, drop_last=drop_last) == whole[start:]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_stream_is_cut_as_a_map_is(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 8))
    samples = data.draw(st.integers(total, 30))
    drop_last = data.draw(st.booleans())
    split = split_of(total, data)
    for rank in range(split.ranks):
        rows = MicroBatchSource(range(samples), split, rank, shuffle=False, drop_last=drop_last).epoch(0)
        stream = MicroBatchSource(Stream(samples), split, rank, drop_last=drop_last).epoch(0)
        assert plain(stream) == plain(rows)


def plain(seen: Iterator[tuple[MicroBatch, Any]]) -> list[tuple[MicroBatch, list[int] | None]]:
    return [(micro, None if data is None else data.tolist()) for micro, data in seen]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    split = Split.of([4])
    orders = {str(of_all(range(20), split, epoch, seed=seed)) for epoch in range(4) for seed in range(4)}
    assert len(orders) == 16
    assert of_all(range(20), split, 1, seed=5) == of_all(range(20), split, 1, seed=5)
    assert of_all(range(8), split, 1, shuffle=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_stream_is_told_its_epoch() -> None:
    feed = MicroBatchSource(Stream(8), Split.of([4]), 0)
    assert [plain(feed.epoch(epoch))[0][1] for epoch in (0, 3, 1)] == [
        [0, 1, 2, 3],
        [300, 301, 302, 303],
        [*range(100, 104)],
    ]


def test_the_order_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    of_all(range(20), Split.of([2, 2]))
    assert torch.equal(torch.get_rng_state(), before)


def test_many_rows_are_asked_for_at_once() -> None:
    assert sorted(chain(*of_all(Rows(), Split.of([3, 0, 2], 2)))) == list(range(20))


def test_anything_that_iterates_is_a_stream() -> None:
    assert of_all(Bare(), Split.of([3, 5], 2)) == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]


# Rank 1 never has samples; 17 of them are two whole global batches and one of 5.
UNEVEN = Split.of([4, 0, 2], [2, 1, 2])


def test_workers_give_what_the_process_itself_gives() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert of_all(range(17), UNEVEN, 1, workers=2) == of_all(range(17), UNEVEN, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_reads_a_stream() -> None:
    assert of_all(Stream(17), UNEVEN, 1, 1, workers=1) == [[*range(106, 112)], [*range(112, 117)]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [range(40), Stream(40)])
def test_a_split_changes_where_it_was_agreed(dataset: Any, workers: int) -> None:
    old, new = Split.of([4, 0], 2), Split.of([1, 3], 2)
    feeds = [MicroBatchSource(dataset, old, rank, workers=workers) for rank in range(2)]
    epochs = [feed.epoch(0) for feed in feeds]
    seen = [[next(epoch)] for epoch in epochs]
    at = max(feed.head() for feed in feeds)
    # Rank 1 has no data, and still runs no further ahead than its workers may.
    assert DataPosition(0, 1) <= at <= DataPosition(0, 4)
    for feed in feeds:
        feed.change(new, at)
    for of_rank, epoch in zip(seen, epochs, strict=True):
        of_rank += epoch
    assert union(seen) == of_all(dataset, old)
    for rank, of_rank in enumerate(seen):
        for micro, _ in of_rank:
            assert micro.count == len((old if micro.batch < at.batch else new).micro[rank])


def test_workers_run_ahead_by_what_they_may() -> None:
    feed = MicroBatchSource(range(40), Split.of([2]), 0, workers=2, prefetch=3)
    assert feed.head() == DataPosition(0, 0)
    epoch = feed.epoch(2, 5)
    assert feed.head() == DataPosition(2, 5)
    next(epoch)
    assert feed.head() == DataPosition(2, 5 + 2 * 3 + 1)
    with pytest.raises(WorldError) as caught:
        feed.change(Split.of([2], 1), DataPosition(2, 11))
    assert str(caught.value) == (
        "rank 0 cannot change its split at global batch 11 of epoch 2, its loader is at 12 of epoch 2; "
        "agree on the furthest loader's head"
    )
    feed.change(Split.of([2], 1), DataPosition(2, 12))
    assert [micro.count for micro, _ in epoch] == [1] * 6 + [2] * 16


def test_a_later_change_takes_the_place_of_what_was_agreed() -> None:
    feed = MicroBatchSource(range(12), Split.of([2]), 0)
    feed.change(Split.of([2], 1), DataPosition(0, 3))
    feed.change(Split.of([2]), DataPosition(0, 2))
    assert [micro.count for micro, _ in feed.epoch(0)] == [1] * 6
    feed.change(Split.of([2], 1), DataPosition(0, 6))  # past the end: with the next epoch
    assert {micro.count for micro, _ in feed.epoch(1)} == {2}


def test_a_change_keeps_the_global_batch_and_the_ranks() -> None:
    feed = MicroBatchSource(range(12), Split.of([2, 2]), 0)
    for split in (Split.of([2, 3]), Split.of([4])):
        with pytest.raises(UserError, match="keep the global batch and the ranks"):
            feed.change(split, DataPosition(1, 0))


def test_a_position_goes_through_json() -> None:
    assert DataPosition.from_json(DataPosition(3, 4).to_json()) == DataPosition(3, 4)


def test_a_dataloader_brings_its_settings() -> None:
    def negated(rows: list[int]) -> list[int]:
        return [-row for row in rows]

    rows: Any = range(10)
    loader = DataLoader(rows, batch_size=7, collate_fn=negated, drop_last=True)
    assert [data for _, data in MicroBatchSource(loader, Split.of([4]), 0).epoch(0)] == [
        [0, -1, -2, -3],
        [-4, -5, -6, -7],
    ]
    shuffled = DataLoader(rows, shuffle=True)
    assert of_all(shuffled, Split.of([4])) == of_all(range(10), Split.of([4]))
    assert of_all(DataLoader(Stream(6), batch_size=2), Split.of([1, 3])) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_workers_of_a_dataloader(persistent: bool) -> None:
    """They know the user's dataset, and ending an epoch early leaves nothing behind for the next."""
    loader = DataLoader(InWorker(), num_workers=1, worker_init_fn=tell, persistent_workers=persistent)
    feed = MicroBatchSource(loader, Split.of([3, 3]), 0)
    next(feed.epoch(0))
    assert plain(feed.epoch(1)) == [(MicroBatch(1, batch, 0, 1, 3, 6, 1), [7, 7, 7]) for batch in (0, 1)]


def test_persistent_workers_begin_a_stream_anew() -> None:
    feed = MicroBatchSource(DataLoader(Stream(8), num_workers=1, persistent_workers=True), Split.of([4]), 0)
    for epoch in (1, 2):
        assert [data for _, data in plain(feed.epoch(epoch, 1))] == [[*range(100 * epoch + 4, 100 * epoch + 8)]]


@pytest.mark.parametrize(
    ("sampler", "name"),
    [
        (SubsetRandomSampler(range(5)), "SubsetRandomSampler"),
        (RandomSampler(range(10), replacement=True), "RandomSampler"),
        (RandomSampler(range(10), num_samples=5), "RandomSampler"),
        (DistributedSampler(range(10), num_replicas=2, rank=0), "DistributedSampler"),  # type: ignore[arg-type]
    ],
)
def test_other_samplers_are_refused(sampler: Any, name: str) -> None:
    with pytest.raises(UserError) as caught:
        MicroBatchSource(DataLoader(range(10), sampler=sampler), Split.of([4]), 0)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"the DataLoader has a {name} of its own, but which rank sees which samples follows from the split; "
        f"give it shuffle = True or False instead"
    )


def test_batches_made_elsewhere_are_refused() -> None:
    with pytest.raises(UserError, match=r"a list of its own.*; give it shuffle = True or False instead"):
        MicroBatchSource(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), Split.of([4]), 0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"batch_size = None.*; let it make batches"):
        MicroBatchSource(DataLoader(range(4), batch_size=None), Split.of([4]), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dataset", [range(5), Stream(5)])
def test_a_dataset_smaller_than_the_batch(dataset: Any, drop_last: bool) -> None:
    with pytest.raises(UserError) as caught:
        list(MicroBatchSource(dataset, Split.of([4, 4]), 0, drop_last=drop_last).epoch(0))
    assert str(caught.value) == "the dataset has 5 samples, fewer than global_batch = 8; use a smaller global_batch"


def test_too_small_a_stream_is_told_in_the_process_itself() -> None:
    with pytest.raises(UserError) as caught:
        list(MicroBatchSource(Stream(5), Split.of([4, 4]), 0, workers=1).epoch(0))
    assert str(caught.value) == "the dataset has 5 samples, fewer than global_batch = 8; use a smaller global_batch"


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (
            Stream(5),
            {"workers": 3},
            "an iterable dataset is read in order by one worker process, but workers = 3; use workers = 1 or 0",
        ),
        (range(5), {"workers": -1}, "workers = -1 is negative; use 0 to load in the process itself"),
        (range(5), {"workers": 1, "prefetch": 0}, "prefetch = 0 leaves the workers idle; use 1 or more"),
        (5, {}, "int is no dataset; give it __len__ and __getitem__, or __iter__ alone for a stream"),
        (
            (row for row in range(5)),
            {},
            "a generator can be read only once; give an object whose __iter__ starts anew for each epoch",
        ),
    ],
)
def test_what_is_wrong_with_a_feed(dataset: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        MicroBatchSource(dataset, Split.of([4]), 0, **options)
    assert str(caught.value) == said


def test_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError):
        len(MicroBatchSource(Stream(5), Split.of([4]), 0))


Pair = namedtuple("Pair", ["x", "name"])


class Moves:
    """Moves itself, as transformers' BatchEncoding does."""

    where = "nowhere"

    def to(self, device: torch.device) -> "Moves":
        moved = Moves()
        moved.where = str(device)
        return moved


def nested(samples: list[int]) -> dict[str, Any]:
    x = torch.tensor(samples)
    mapping = UserDict({"x": x})
    return {
        "pair": Pair(x, "name"),
        "list": [x, (x, 3), None],
        "ordered": OrderedDict(x=x),
        "user": mapping,
        "moves": Moves(),
    }


def check_nested(batch: dict[str, Any], device: str) -> None:
    """Everything arrived, and every container is of its own kind."""
    tensors = [batch["pair"].x, batch["list"][0], batch["list"][1][0], batch["ordered"]["x"], batch["user"]["x"]]
    assert {str(tensor.device) for tensor in tensors} == {device}
    assert type(batch["pair"]) is Pair
    assert batch["pair"].name == "name"
    assert type(batch["list"]) is list
    assert type(batch["list"][1]) is tuple
    assert batch["list"][1][1] == 3
    assert batch["list"][2] is None
    assert type(batch["ordered"]) is OrderedDict
    assert type(batch["user"]) is UserDict
    assert batch["moves"].where == device


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda:0", marks=gpu)])
def test_batches_go_to_the_device(device: str) -> None:
    batches = list(MicroBatchSource(range(8), Split.of([4, 4], 2), 1, collate=nested, device=device).epoch(0))
    assert len(batches) == 2
    for _, batch in batches:
        check_nested(batch, device)


@gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_run_ahead_and_arrive_whole(workers: int) -> None:
    """With the device kept busy, so that a copy into memory still in use would be seen."""
    rows = torch.arange(64).repeat_interleave(1 << 16).view(64, -1)
    feed = MicroBatchSource(rows, Split.of([4, 4], 2), 0, workers=workers, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    found, want = [], MicroBatchSource(range(64), Split.of([4, 4], 2), 0).epoch(0)
    for _, batch in feed.epoch(0):
        busy = (busy @ busy).clamp_(-1, 1)
        found.append(batch.float().mean(dim=1))
    assert feed.head() == DataPosition(0, 8)
    assert [batch.tolist() for batch in found] == [data.tolist() for _, data in want]
