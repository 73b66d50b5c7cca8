"""Loading settings, worker processes and device copies: the same batches, however they are loaded."""

import random
from collections import OrderedDict, UserDict, namedtuple
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from support.micro_batches import Stream, of_all, plain
from torch.utils.data import (
    DataLoader,
    Dataset,
    get_worker_info,
)

from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.data.position import DataPosition, MicroBatch
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.planner import Split

# Python 3.12 says so of any process with threads, such as a worker of pytest-xdist.
pytestmark = pytest.mark.filterwarnings(r"ignore:.*use of fork\(\) may lead:DeprecationWarning")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class NumberedRows(Dataset[int]):
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


def test_getitems_is_used_for_many_rows_at_once() -> None:
    assert sorted(chain(*of_all(NumberedRows(), Split.of([3, 0, 2], 2)))) == list(range(20))


# Rank 1 never has samples; 17 of them are two whole global batches and one of 5.
UNEVEN = Split.of([4, 0, 2], [2, 1, 2])


def test_workers_load_the_same_batches_as_the_process_itself() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert of_all(range(17), UNEVEN, 1, num_workers=2) == of_all(range(17), UNEVEN, 1)
    assert torch.equal(torch.get_rng_state(), before)


class Augmented(Dataset[Any]):
    """Random numbers of torch, Python and NumPy."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.random_sample())])


def drawn_in_workers(rank: int = 0, epoch: int = 0, start: int = 0, **options: Any) -> list[Any]:
    source = MicroBatchSource(Augmented(), Split.of([2, 1], 1), rank, **{"num_workers": 2, **options})
    return [data.tolist() for _, data in source.epoch(epoch, start)]


def test_workers_draw_the_same_however_many_there_are_and_where_an_epoch_is_resumed() -> None:
    whole = drawn_in_workers()
    assert drawn_in_workers(num_workers=1, prefetch_factor=1) == whole
    assert drawn_in_workers(start=1) == whole[2:]


def test_workers_draw_other_numbers_for_each_micro_batch_rank_epoch_and_seed() -> None:
    others: list[dict[str, Any]] = [{}, {"rank": 1}, {"epoch": 1}, {"seed": 1}]
    drawn = [sample for options in others for batch in drawn_in_workers(**options) for sample in batch]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(numbers) == 8 + 4 + 8 + 8


def test_a_worker_reads_a_stream() -> None:
    assert of_all(Stream(17), UNEVEN, 1, 1, num_workers=1) == [[*range(106, 112)], [*range(112, 117)]]


def test_workers_run_ahead_by_prefetch_factor() -> None:
    source = MicroBatchSource(range(40), Split.of([2]), 0, num_workers=2, prefetch_factor=3)
    assert source.head() == DataPosition(0, 0)
    epoch = source.epoch(2, 5)
    assert source.head() == DataPosition(2, 5)
    next(epoch)
    assert source.head() == DataPosition(2, 5 + 2 * 3 + 1)
    with pytest.raises(WorldError) as caught:
        source.change_split(Split.of([2], 1), DataPosition(2, 11))
    assert str(caught.value) == (
        "rank 0 cannot change its split at global batch 11 of epoch 2, its loader is at 12 of epoch 2; "
        "agree on the furthest loader's head"
    )
    source.change_split(Split.of([2], 1), DataPosition(2, 12))
    assert [micro.num_micro_steps for micro, _ in epoch] == [1] * 6 + [2] * 16


def test_a_dataloader_keeps_its_settings() -> None:
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
def test_workers_of_a_dataloader_see_the_users_dataset(persistent: bool) -> None:
    """They know the user's dataset, and ending an epoch early leaves nothing behind for the next."""
    loader = DataLoader(InWorker(), num_workers=1, worker_init_fn=tell, persistent_workers=persistent)
    source = MicroBatchSource(loader, Split.of([3, 3]), 0)
    next(source.epoch(0))
    micros = [MicroBatch(epoch=1, batch=batch, index=0, sizes=(3,), split=Split.of([3, 3])) for batch in (0, 1)]
    assert plain(source.epoch(1)) == [(micro, [7, 7, 7]) for micro in micros]


def test_persistent_workers_restart_a_stream() -> None:
    source = MicroBatchSource(DataLoader(Stream(8), num_workers=1, persistent_workers=True), Split.of([4]), 0)
    for epoch in (1, 2):
        assert [data for _, data in plain(source.epoch(epoch, 1))] == [[*range(100 * epoch + 4, 100 * epoch + 8)]]


def test_a_dataloader_without_batches_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch_size = None.*; give it a batch_size"):
        MicroBatchSource(DataLoader(range(4), batch_size=None), Split.of([4]), 0)  # type: ignore[arg-type]


def test_a_stream_that_is_too_small_is_refused_in_the_training_process() -> None:
    with pytest.raises(UserError) as caught:
        list(MicroBatchSource(Stream(5), Split.of([4, 4]), 0, num_workers=1).epoch(0))
    assert str(caught.value) == "the dataset has 5 samples, fewer than global_batch = 8; use a smaller global_batch"


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        (
            range(5),
            {"stream_per_rank": True},
            "stream_per_rank says how ranks read an iterable dataset, which this is not; leave it out",
        ),
        (Stream(5), {"stream_per_rank": "yes"}, "stream_per_rank is 'yes'; use True or False, or leave it out"),
        (
            Stream(5),
            {"sampler": [1, 2]},
            "an iterable dataset gives its samples in its own order; leave sampler out",
        ),
        (range(5), {"num_workers": -1}, "num_workers = -1 is negative; use 0 to load in the training process"),
        (
            range(5),
            {"num_workers": 1, "prefetch_factor": 0},
            "prefetch_factor = 0 leaves the workers idle; use 1 or more",
        ),
        (5, {}, "int is not a dataset; give it __len__ and __getitem__, or __iter__ alone for a stream"),
        (
            (row for row in range(5)),
            {},
            "a generator can be read only once; give an object whose __iter__ restarts for each epoch",
        ),
    ],
)
def test_wrong_loading_settings_are_refused(dataset: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        MicroBatchSource(dataset, Split.of([4]), 0, **options)
    assert str(caught.value) == sentence


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
def test_nested_batches_move_to_the_device(device: str) -> None:
    batches = list(MicroBatchSource(range(8), Split.of([4, 4], 2), 1, collate_fn=nested, device=device).epoch(0))
    assert len(batches) == 2
    for _, batch in batches:
        check_nested(batch, device)


@gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_run_ahead_and_arrive_complete(workers: int) -> None:
    """With the device kept busy, so that a copy into memory still in use would be seen."""
    rows = torch.arange(64).repeat_interleave(1 << 16).view(64, -1)
    source = MicroBatchSource(rows, Split.of([4, 4], 2), 0, num_workers=workers, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    batches, expected = [], MicroBatchSource(range(64), Split.of([4, 4], 2), 0).epoch(0)
    for _, batch in source.epoch(0):
        busy = (busy @ busy).clamp_(-1, 1)
        batches.append(batch.float().mean(dim=1))
    assert source.head() == DataPosition(0, 8)
    assert [batch.tolist() for batch in batches] == [data.tolist() for _, data in expected]
