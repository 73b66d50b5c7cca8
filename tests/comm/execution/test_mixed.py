"""Windows inside hosts and messages between them, on ranks that are threads; Gloo carries the messages for real."""

from itertools import product

import pytest
import torch
from support.ranks import ARENA_BYTES, in_groups

from mimatrix.collectives import AlgorithmRequest, Collective, build
from mimatrix.collectives.shares import Shares
from mimatrix.comm import AlgorithmChoice, Group
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.execution.mixed import check_mixed
from mimatrix.comm.out_of_place import AllGatherInto, ReduceScatterInto
from mimatrix.core.errors import MismatchError, UnsuitedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LAYOUTS = ("aab", "abab", "abbb")
CHUNK_BYTES = ARENA_BYTES // 64
LENGTHS = (1, 5, 1000, CHUNK_BYTES // 8 + 3, CHUNK_BYTES // 4)
"""Of float64: a few, and some that pass in one chunk and in several."""


def mixed(segments: int = 1) -> AlgorithmChoice:
    return AlgorithmChoice("mixed", "two_level", segments)


def data(rank: int, count: int) -> torch.Tensor:
    return torch.sin(torch.arange(count, dtype=torch.float64) * (rank + 1))


def total(ranks: int, count: int) -> torch.Tensor:
    return torch.stack([data(rank, count) for rank in range(ranks)]).sum(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce_over_hosts_is_exact(layout: str) -> None:
    def on_rank(group: Group) -> None:
        for count, segments in product(LENGTHS, (1, 4)):
            tensor = data(group.rank, count)
            group.all_reduce(tensor, choice=mixed(segments))
            torch.testing.assert_close(tensor, total(len(layout), count), rtol=0, atol=1e-12)
            average = data(group.rank, count)
            group.all_reduce(average, "avg", choice=mixed(segments))
            torch.testing.assert_close(average, total(len(layout), count) / len(layout), rtol=0, atol=1e-12)
        assert set(group.counters) == {"all_reduce mixed gloo"}

    in_groups(len(layout), on_rank, hosts=list(layout), with_gloo=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (5, 3, 2, 0), (0, 0, 1, 9)])
def test_shards_over_hosts_are_exact(layout: str, weights: tuple[int, ...]) -> None:
    shares = Shares.of(weights[: len(layout)])

    def on_rank(group: Group) -> None:
        for count, segments in product(LENGTHS, (1, 4)):
            part = group.part(count, shares)
            tensor = data(group.rank, count)
            group.reduce_scatter(tensor, shares=shares, choice=mixed(segments))
            own, wanted = tensor[part.start : part.stop], total(len(layout), count)[part.start : part.stop]
            torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)
            gathered = torch.full((count,), float("nan"), dtype=torch.float64)
            gathered[part.start : part.stop] = data(0, count)[part.start : part.stop]
            group.all_gather(gathered, shares=shares, choice=mixed(segments))
            assert torch.equal(gathered, data(0, count))

    in_groups(len(layout), on_rank, hosts=list(layout), with_gloo=True)


def test_calls_between_two_tensors_are_exact_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_TRANSPORT", "mixed")

    def on_rank(group: Group) -> None:
        shard, full = data(group.rank, 50), torch.empty(150, dtype=torch.float64)
        gather = AllGatherInto(full=full, shard=shard, rank=group.rank, world_size=3)
        group.start_into(gather, may_run_here=False).wait()
        assert torch.equal(full, torch.cat([data(rank, 50) for rank in range(3)]))
        scatter = ReduceScatterInto(shard=shard, full=full, reduce_op="sum", rank=group.rank, world_size=3)
        group.start_into(scatter, may_run_here=False).wait()
        torch.testing.assert_close(shard, 3 * data(group.rank, 50), rtol=0, atol=1e-12)
        assert {name for name in group.counters if "mixed" not in name} == set()

    in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True, tune=True)


def test_different_calls_are_refused_on_both_hosts() -> None:
    def on_rank(group: Group) -> None:
        with pytest.raises(MismatchError, match="ranks disagree"):
            group.all_reduce(torch.ones(1000 if group.rank == 3 else 10), choice=mixed())

    in_groups(4, on_rank, hosts=["a", "a", "b", "b"], with_gloo=True)


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_mixed_is_refused_where_there_is_nothing_to_mix(hosts: list[str]) -> None:
    def on_rank(group: Group) -> None:
        assert "mixed" not in group.transports
        with pytest.raises(UnsuitedError, match="needs several hosts, of which one has several ranks"):
            group.all_reduce(torch.ones(10), choice=mixed())

    in_groups(2, on_rank, hosts=hosts, with_gloo=True)


def test_schedules_whose_messages_would_replace_what_neighbours_read_are_refused() -> None:
    hosts = ((0, 1), (2, 3))
    with pytest.raises(UnsuitedError, match="use two_level"):
        check_mixed(build("ring", AlgorithmRequest(Collective.ALL_REDUCE, 4)), hosts)
    check_mixed(build("two_level", AlgorithmRequest(Collective.ALL_REDUCE, 4, groups=hosts)), hosts)


def test_algorithm_that_does_not_fit_is_refused_on_all_ranks_alike() -> None:
    def on_rank(group: Group) -> None:
        with pytest.raises(UnsuitedError, match="ring would replace by messages"):
            group.all_reduce(torch.ones(1000), choice=AlgorithmChoice("mixed", "ring"))
        group.all_reduce(torch.ones(1000), choice=mixed())  # the group is as good as before

    in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True)


def test_arena_without_room_on_one_rank_leaves_all_without_mixed() -> None:
    def on_rank(group: Group) -> None:
        endpoint, filler = group.endpoint, None
        if group.rank == 2:
            filler = endpoint.arenas["host"].allocate(endpoint.arenas["host"].largest_free_bytes - (64 << 10))
        group.barrier()
        backends = dict(group.backends)
        other = Group.create(endpoint, "other", range(3), backends=backends, tune=False, timeout_s=20)
        assert "mixed" not in other.transports
        assert "mixed" in group.transports
        if filler:
            filler.free()

    in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True)


def test_group_that_is_closed_finishes_the_calls_that_are_queued() -> None:
    def on_rank(group: Group) -> None:
        tensors = [torch.full((100_000,), float(group.rank + 1)) for _ in range(5)]
        works = [group.all_reduce(tensor, choice=mixed(), wait=False) for tensor in tensors]
        group.close()
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert (tensor == 6.0).all()

    in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True)


def test_groups_that_are_closed_return_their_slots() -> None:
    def on_rank(group: Group) -> int:
        arena = group.endpoint.arenas["host"]
        before = arena.largest_free_bytes
        for number in range(40):
            other = Group.create(group.endpoint, f"g{number}", range(3), backends=dict(group.backends), tune=False)
            other.all_reduce(torch.ones(1000), choice=mixed())
            other.close()
        return before - arena.largest_free_bytes

    lost = in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True)
    assert max(lost) <= 40 * 4096, "only a page of flags for each"


def test_two_levels_are_a_candidate_for_shares_and_sums() -> None:
    def on_rank(group: Group) -> None:
        assert group.tuner
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            op = CollectiveOp(collective, torch.float32)
            found = group.tuner.candidates(group.size_class(op, torch.empty(1 << 20)))
            assert {"mixed two_level", "mixed two_level/4", "mixed two_level/16"} <= found.keys()

    in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True, tune=True)
