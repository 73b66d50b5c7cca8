"""Collectives of a c10d backend in flat form: over Gloo for their results, over a fake NCCL for what it is asked."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_nccl import FakeNccl
from support.ranks import in_groups

from mimatrix.collectives.schedule import Collective
from mimatrix.comm import C10dBackend, Group
from mimatrix.comm.calls import Way
from mimatrix.core.errors import UnsuitedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RANKS = 3
EVEN, UNEVEN, EMPTY = [4, 4, 4], [1, 7, 3], [0, 6, 0]
OPS = ("sum", "avg", "max", "min")


def data(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def expected(count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    every = torch.stack([data(rank, count, dtype) for rank in range(RANKS)]).double()
    results = {"sum": every.sum(0), "avg": every.mean(0), "max": every.amax(0), "min": every.amin(0)}
    return results[op].to(dtype)


def gloo(group: Group) -> C10dBackend:
    assert group.cpu_backend
    return group.cpu_backend


def test_all_reduces_of_gloo_are_exact_for_every_operation() -> None:
    def on_rank(group: Group) -> None:
        for op, dtype in product(OPS, (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8)):
            flat = data(group.rank, 11, dtype)
            gloo(group).run(Collective.ALL_REDUCE, flat, op, 0)
            assert torch.equal(flat, expected(11, dtype, op)), (op, dtype)

    in_groups(RANKS, on_rank, with_gloo=True)


def test_broadcasts_of_gloo_copy_the_root_in_any_type() -> None:
    def on_rank(group: Group) -> None:
        for root, dtype in product(range(RANKS), (torch.float32, torch.bfloat16, torch.int16)):
            flat = data(group.rank, 11, dtype)
            gloo(group).run(Collective.BROADCAST, flat, "sum", root)
            assert torch.equal(flat, data(root, 11, dtype)), (root, dtype)

    in_groups(RANKS, on_rank, with_gloo=True)


WAYS: list[tuple[Way, list[int] | None]] = [
    ("equal", None),
    ("equal", EVEN),
    ("padded", EVEN),
    ("padded", UNEVEN),
    ("padded", EMPTY),
]


def test_reduce_scatters_of_gloo_leave_each_rank_its_shard() -> None:
    def on_rank(group: Group) -> None:
        for (way, counts), op, dtype in product(WAYS, OPS, (torch.float64, torch.int32)):
            sizes = counts or EVEN
            flat = data(group.rank, sum(sizes), dtype)
            gloo(group).run(Collective.REDUCE_SCATTER, flat, op, 0, counts, way)
            own = expected(sum(sizes), dtype, op).split_with_sizes(sizes)[group.rank]
            assert torch.equal(flat.split_with_sizes(sizes)[group.rank], own), (way, counts, op, dtype)

    in_groups(RANKS, on_rank, with_gloo=True)


def test_all_gathers_of_gloo_fill_all_ranks_in_any_type() -> None:
    def on_rank(group: Group) -> None:
        for (way, counts), dtype in product(WAYS, (torch.float64, torch.int32, torch.int16, torch.bfloat16)):
            sizes = counts or EVEN
            full = data(0, sum(sizes), dtype)
            flat = torch.full_like(full, 99)
            flat.split_with_sizes(sizes)[group.rank].copy_(full.split_with_sizes(sizes)[group.rank])
            gloo(group).run(Collective.ALL_GATHER, flat, "sum", 0, counts, way)
            assert torch.equal(flat, full), (way, counts, dtype)

    in_groups(RANKS, on_rank, with_gloo=True)


def test_all_ranks_get_the_same_maxima() -> None:
    def on_rank(group: Group) -> list[float]:
        return gloo(group).max_over_ranks([0.1 * group.rank, -0.1 * group.rank])

    assert in_groups(RANKS, on_rank, with_gloo=True) == [[0.2, 0.0]] * RANKS


@pytest.mark.parametrize("collective", [Collective.REDUCE_SCATTER, Collective.ALL_GATHER])
def test_length_that_is_not_equal_shards_is_refused_without_counts(collective: Collective) -> None:
    backend = C10dBackend(FakeNccl(0, RANKS), 0, RANKS, 20.0)
    with pytest.raises(UnsuitedError, match="11 elements are not 3 equal shards; give the counts"):
        backend.run(collective, torch.ones(11), "sum", 0)


def test_nothing_is_launched_on_the_fast_path_of_gloo() -> None:
    def on_rank(group: Group) -> None:
        assert not gloo(group).is_nccl
        for collective in Collective:
            assert gloo(group).launcher(collective, torch.float32, "sum", 0, is_async=True) is None

    in_groups(2, on_rank, with_gloo=True)


@pytest.fixture
def nccl() -> FakeNccl:
    return FakeNccl(1, RANKS)


@pytest.fixture
def backend(nccl: FakeNccl) -> C10dBackend:
    """Rank 1 of three."""
    return C10dBackend(nccl, 1, RANKS, 20.0)


def places(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_average_of_floats_is_one_of_nccl(dtype: torch.dtype, nccl: FakeNccl, backend: C10dBackend) -> None:
    _, finish = backend.launch(Collective.ALL_REDUCE, torch.ones(6, dtype=dtype), "avg", 0)
    assert finish is None
    _, finish = backend.launch(Collective.REDUCE_SCATTER, torch.ones(6, dtype=dtype), "avg", 0)
    assert finish is None
    assert [call[-1] for call in nccl.calls] == [dist.ReduceOp.AVG] * 2


@pytest.mark.parametrize(("way", "counts"), [("equal", [2, 2, 2]), ("lists", [1, 4, 1]), ("padded", [1, 4, 1])])
def test_average_of_integers_is_a_sum_of_nccl_divided_afterwards(
    way: Way, counts: list[int], nccl: FakeNccl, backend: C10dBackend
) -> None:
    values = torch.tensor([-7, -1, 4, 7, 8, 9])
    reduced, scattered = values.clone(), values.clone()
    backend.run(Collective.ALL_REDUCE, reduced, "avg", 0)
    backend.run(Collective.REDUCE_SCATTER, scattered, "avg", 0, counts, way)
    assert [call[-1] for call in nccl.calls] == [dist.ReduceOp.SUM] * 2
    assert torch.equal(reduced, values)
    assert torch.equal(scattered.split_with_sizes(counts)[1], values.split_with_sizes(counts)[1])


def test_equal_shards_are_handed_to_nccl_where_they_are(nccl: FakeNccl, backend: C10dBackend) -> None:
    flat = torch.arange(6.0)
    backend.run(Collective.ALL_GATHER, flat, "sum", 0)
    backend.run(Collective.REDUCE_SCATTER, flat, "max", 0)
    (_, full, shard), (_, reduced, whole, op) = nccl.calls
    assert [call[0] for call in nccl.calls] == ["_allgather_base", "_reduce_scatter_base"]
    assert places([full, whole]) == places([flat, flat])
    assert places([shard, reduced]) == places([flat[2:4], flat[2:4]])
    assert op == dist.ReduceOp.MAX


def test_lists_are_views_of_the_tensor(nccl: FakeNccl, backend: C10dBackend) -> None:
    flat = torch.arange(11.0)
    shards = list(flat.split_with_sizes(UNEVEN))
    backend.run(Collective.ALL_GATHER, flat, "sum", 0, UNEVEN, "lists")
    backend.run(Collective.REDUCE_SCATTER, flat, "sum", 0, UNEVEN, "lists")
    (_, [outputs], inputs), (_, reduced, [addends], _) = nccl.calls
    assert places(outputs) == places(addends) == places(shards)
    assert places(inputs) == places(reduced) == places([shards[1]])


@pytest.mark.parametrize(("way", "counts"), [("equal", None), ("lists", UNEVEN), ("padded", UNEVEN)])
def test_all_gather_of_a_type_that_nccl_does_not_know_goes_as_bytes(
    way: Way, counts: list[int] | None, nccl: FakeNccl, backend: C10dBackend
) -> None:
    flat = torch.arange(sum(counts or EVEN), dtype=torch.int16)
    sizes = [2 * count for count in counts or EVEN]
    backend.launch(Collective.ALL_GATHER, flat, "sum", 0, counts, way)
    ((_, output, own),) = nccl.calls
    if way == "lists":
        assert [(shard.dtype, shard.numel()) for shard in output[0]] == [(torch.uint8, size) for size in sizes]
        assert own[0].numel() == sizes[1]
    else:
        assert (output.dtype, own.dtype) == (torch.uint8, torch.uint8)
        assert own.numel() == max(sizes)
        assert output.numel() == RANKS * max(sizes)


@pytest.mark.parametrize(
    ("collective", "arguments", "name"),
    [
        (Collective.ALL_REDUCE, 1, "allreduce"),
        (Collective.BROADCAST, 1, "broadcast"),
        (Collective.ALL_GATHER, 2, "_allgather_base"),
        (Collective.REDUCE_SCATTER, 2, "_reduce_scatter_base"),
    ],
)
def test_fast_path_of_nccl_makes_the_call_that_launch_makes(
    collective: Collective, arguments: int, name: str, nccl: FakeNccl, backend: C10dBackend
) -> None:
    full = torch.ones(6)
    tensors = [full, full[2:4]][:arguments]
    for is_async in (True, False):
        launch = backend.launcher(collective, torch.float32, "max", 2, is_async=is_async)
        assert launch
        launch(*tensors)
    backend.launch(collective, full, "max", 2)
    *fast, plain = nccl.calls
    assert fast[0][0] == name
    assert _described(fast[0]) == _described(fast[1]) == _described(plain)
    assert nccl.async_ops == [True, False, True]


@pytest.mark.parametrize(("dtype", "op"), [(torch.int64, "avg"), (torch.int16, "sum"), (torch.int16, "max")])
def test_fast_path_of_nccl_is_not_for_what_needs_more_than_a_launch(
    dtype: torch.dtype, op: str, backend: C10dBackend
) -> None:
    assert backend.launcher(Collective.ALL_REDUCE, dtype, op, 0, is_async=True) is None


def _described(call: tuple[Any, ...]) -> list[Any]:
    """Return a recorded call with places instead of tensors."""
    flat = [part for each in call for part in (each if isinstance(each, list) else [each])]
    return [places([part]) if isinstance(part, torch.Tensor) else part for part in flat]
