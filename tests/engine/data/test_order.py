"""Any sampler gives the global order of an epoch, which the split cuts."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.micro_batches import of_all
from support.models import vectors
from support.runs import in_runs
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from mimatrix.core.errors import UserError
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.run import Run
from mimatrix.planner import Split

ROWS: Any = range(20)
WEIGHTS = [1.0] * 10 + [0.0] * 10
SPLITS = [Split.of([6]), Split.of([4, 0, 2], 2), Split.of([1, 5], 3)]


class ByLength(Sampler[list[int]]):
    """Batches of samples of similar length, in another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-20 // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = [(row + self.epoch) % 20 for row in range(20)]
        return (rows[start : start + self.size] for start in range(0, 20, self.size))


class Repeated(Sampler[int]):
    """Each sample twice in a row, shuffled by Python's, NumPy's or its own generators."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.own, self.numpy = random.Random(5), np.random.default_rng(5)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        match self.kind:
            case "python":
                rows = random.sample(range(20), 20)
            case "numpy":
                rows = np.random.permutation(20).tolist()
            case "own":
                rows = self.own.sample(range(20), 20)
            case _:
                rows = self.numpy.permutation(20).tolist()
        return chain.from_iterable((row, row) for row in rows)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 17),
    "replacement": lambda: RandomSampler(ROWS, replacement=True, num_samples=25),
    "fewer": lambda: RandomSampler(ROWS, num_samples=15),
    "subset": lambda: SubsetRandomSampler(range(3, 18)),
    "one replica": lambda: DistributedSampler(ROWS, num_replicas=1, rank=0, seed=4),
    "python": lambda: Repeated("python"),
    "numpy": lambda: Repeated("numpy"),
    "own": lambda: Repeated("own"),
    "own numpy": lambda: Repeated("own numpy"),
    "list": lambda: [5, 3, 3, 9, 1, 0, 2],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_the_same_order_on_any_ranks_and_when_resumed(name: str) -> None:
    make = SAMPLERS[name]
    loader = DataLoader(ROWS, sampler=make())
    whole = of_all(loader, SPLITS[0], 2)
    assert len(list(chain(*whole))) == len(make())
    assert len(MicroBatchSource(loader, SPLITS[0], 0)) == len(whole)
    assert MicroBatchSource(loader, SPLITS[0], 0).num_samples == len(make())
    for split in SPLITS:
        assert of_all(DataLoader(ROWS, sampler=make()), split, 2) == whole
    torch.manual_seed(77)
    assert of_all(ROWS, SPLITS[1], 2, 1, sampler=make()) == whole[1:]


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "list"])
def test_a_sampler_draws_anew_in_each_epoch_and_leaves_generators_alone(name: str) -> None:
    sampler = SAMPLERS[name]()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), numpy_state()
    orders = {str(of_all(DataLoader(ROWS, sampler=sampler), SPLITS[0], epoch)) for epoch in range(3)}
    orders |= {str(of_all(DataLoader(ROWS, sampler=sampler), SPLITS[0], epoch)) for epoch in range(3)}
    assert len(orders) == 3
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy_state()) == before[1:]


def numpy_state() -> str:
    return str(np.random.get_state(legacy=False))


def test_a_weighted_sampler_draws_by_its_weights() -> None:
    sampler = WeightedRandomSampler([3.0] + [1.0] * 9, 4000)
    counts = Counter(chain(*of_all(ROWS, SPLITS[1], sampler=sampler)))
    assert 900 < counts[0] < 1100
    assert set(counts) == set(range(10))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: DataLoader(ROWS, shuffle=True, generator=torch.Generator().manual_seed(seed)),
        lambda seed: DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 20, 20, generator=seeded(seed))),
        lambda seed: DataLoader(ROWS, sampler=SubsetRandomSampler(range(15)), generator=seeded(seed)),
        lambda seed: DataLoader(
            ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS, generator=seeded(seed)), 6, False)
        ),
    ],
    ids=["shuffle", "weighted", "loader", "batches"],
)
def test_a_generator_of_the_user_enters_the_order_and_keeps_its_state(make: Any) -> None:
    orders = [of_all(make(seed), SPLITS[0]) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    loader = make(1)
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    before = generator.get_state() if generator else torch.zeros(1)
    of_all(loader, SPLITS[1], 3)
    assert torch.equal(generator.get_state() if generator else torch.zeros(1), before)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_batches_of_a_batch_sampler_are_the_global_batches() -> None:
    expected = [list(batch) for batch in at_epoch(ByLength(6), 3)]
    for split in SPLITS:
        assert of_all(DataLoader(ROWS, batch_sampler=ByLength(6)), split, 3) == expected
        assert of_all(ROWS, split, 3, 2, batch_sampler=ByLength(6)) == expected[2:]
    source = MicroBatchSource(ROWS, SPLITS[0], 0, batch_sampler=ByLength(6))
    assert (len(source), source.num_samples) == (4, 20)
    in_order = DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 6, drop_last=True))
    assert of_all(in_order, SPLITS[1]) == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]


class CountsEpochs(Sampler[list[int]]):
    """Has no `set_epoch`, and counts how often it was asked; shuffles its rows in place."""

    def __init__(self, size: int) -> None:
        self.size, self.asked, self.rows = size, 0, list(range(20))

    def __len__(self) -> int:
        return -(-20 // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        self.asked += 1
        random.Random(self.asked).shuffle(self.rows)
        return iter([self.rows[start : start + self.size] for start in range(0, 20, self.size)])


@pytest.mark.parametrize("in_loader", [False, True])
def test_counting_samples_does_not_begin_an_epoch_of_a_batch_sampler(in_loader: bool) -> None:
    expected = CountsEpochs(6)
    epochs = [[*expected], [*expected]]
    sampler = CountsEpochs(6)
    if in_loader:
        source = MicroBatchSource(DataLoader(ROWS, batch_sampler=sampler), SPLITS[0], 0)
    else:
        source = MicroBatchSource(ROWS, SPLITS[0], 0, batch_sampler=sampler)
    assert (len(source), source.num_samples, sampler.asked) == (4, 20, 0)
    next(source.epoch(0))
    for number, batches in enumerate(epochs):
        assert [data.tolist() for _, data in source.epoch(number)] == batches
    assert sampler.asked == 2


class CountsDraws(Sampler[int]):
    """Another order each time it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(random.Random(self.asked).sample(range(12), 12))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("make", "step", "is_refused"),
    [(CountsDraws, 5, True), (CountsDraws, 1, False), (lambda: SubsetRandomSampler(range(12)), 5, False)],
    ids=["counts epochs", "first epoch", "depends on the epoch"],
)
def test_a_sampler_with_another_order_after_a_resume_is_refused(
    tmp_path: Path, make: Callable[[], Any], step: int, is_refused: bool, ranks: int
) -> None:
    def train(run: Run, *, resumes: bool) -> None:
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, prepared, loader = run.prepare(model, optimizer, vectors(12), sampler=make())
        if resumes:
            assert run.load(tmp_path)
        for _ in run.epochs(2):
            for inputs, _ in loader:
                run.backward(model(inputs).mean())
                prepared.step()
                if not run.in_batch and run.step == step and not resumes:
                    run.save(tmp_path, wait=True)

    def resume(run: Run) -> str:
        try:
            train(run, resumes=True)
        except UserError as error:
            return str(error)
        return ""

    batch = [[4], [3, 1]][ranks - 1]
    in_runs(ranks, lambda run: train(run, resumes=False), batch=batch)
    says = (
        "the sampler gives epoch 1 another order than before the checkpoint, so the rest of it would not be the "
        "samples that were not seen yet; let its order depend on set_epoch(epoch) alone, or use a checkpoint from an "
        "epoch's start"
    )
    assert in_runs(ranks, resume, batch=batch) == [says if is_refused else ""] * ranks


def at_epoch(sampler: Any, epoch: int) -> Any:
    sampler.set_epoch(epoch)
    return sampler


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class Longer(Endless):
    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"sampler": DistributedSampler(ROWS, num_replicas=2, rank=0)},
            "DistributedSampler gives one of 2 replicas its part, but the split decides which rank sees which samples; "
            "create it with num_replicas=1, rank=0, or leave it out",
        ),
        (
            {"batch_sampler": BatchSampler(DistributedSampler(ROWS, num_replicas=3, rank=1), 6, False)},
            "DistributedSampler gives one of 3 replicas its part, but the split decides which rank sees which samples; "
            "create it with num_replicas=1, rank=0, or leave it out",
        ),
        (
            {"batch_sampler": ByLength(4)},
            "batch 0 of ByLength has 4 samples, and a global batch has 6; let it yield global batches, of which only "
            "the last may be smaller",
        ),
        ({"sampler": Endless()}, "Endless has no length, so an epoch has no end; give it __len__"),
        (
            {"sampler": Longer()},
            "Longer has the length 12 and yields more; let __len__ return what it yields",
        ),
        (
            {"sampler": [1, 2], "batch_sampler": [[1, 2]]},
            "both sampler and batch_sampler were given, and each is an order; leave one of them out",
        ),
        (
            {"sampler": [1, 2, 3]},
            "the sampler has 3 samples, fewer than global_batch = 6; use a smaller global_batch",
        ),
    ],
)
def test_samplers_that_give_no_global_order_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        list(MicroBatchSource(ROWS, Split.of([6]), 0, **options).epoch(0))
    assert str(caught.value) == sentence


def test_samplers_that_differ_by_rank_are_refused_on_all_ranks() -> None:
    def on_rank(run: Run) -> str:
        model = nn.Linear(1, 1).double()
        data: Any = [torch.tensor([float(row)], dtype=torch.float64) for row in range(20)]
        sampler = SubsetRandomSampler(range(run.rank, 10 + run.rank))
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(data, sampler=sampler)
        )

        def train() -> None:
            for batch in loader:
                run.backward(model(batch).mean())
                optimizer.step()

        with pytest.raises(UserError) as caught:
            train()
        assert run.step == 0
        return str(caught.value)

    says = (
        "the sampler gives rank 1 another order than rank 0, and the split cuts one order; seed it with the same "
        "number on all ranks"
    )
    assert in_runs(2, on_rank, batch=[3, 2]) == [says] * 2


def test_a_dataloader_whose_generator_is_seeded_by_rank_is_refused() -> None:
    def on_rank(run: Run) -> None:
        model = nn.Linear(6, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(run.rank)
        data: Any = vectors(12)
        loader: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        for _ in run.prepare(model, optimizer, loader)[2]:
            pass

    with pytest.raises(UserError, match="gives rank 1 another order than rank 0"):
        in_runs(2, on_rank, batch=[2, 2])
