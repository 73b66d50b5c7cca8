"""Calls that NCCL carries, on ranks that are threads; a fake on the meta device plays NCCL, so no data move."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.fake_nccl import FakeNccl, FakeStreamTask
from support.ranks import in_groups

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm import Group
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.out_of_place import AllGatherInto, ReduceScatterInto
from mimatrix.comm.tuning.choice import LISTS
from mimatrix.comm.work import StreamWork
from mimatrix.core.errors import MismatchError, UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RANKS = 3
SUM = CollectiveOp(Collective.ALL_REDUCE, torch.float32)


@pytest.fixture(autouse=True)
def native_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have one candidate for every call, so that nothing is measured."""
    monkeypatch.setenv("MIMATRIX_TRANSPORT", "c10d")
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))


def on_meta(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


def run(on_rank: Callable[[Group], None]) -> None:
    """Run on ranks of as many hosts, so that there are no windows between them."""
    hosts = [f"host-{rank}" for rank in range(RANKS)]
    in_groups(
        RANKS, on_rank, hosts=hosts, kinds=dict, with_gloo=True, nccl=lambda rank: FakeNccl(rank, RANKS), tune=True
    )


def fake_of(group: Group) -> FakeNccl:
    fake = group.backends["meta"].backend
    assert isinstance(fake, FakeNccl)
    return fake


def names(group: Group) -> list[str]:
    return [name for name, *_ in fake_of(group).calls]


def test_every_collective_is_launched_on_the_calling_thread_and_counted() -> None:
    def on_rank(group: Group) -> None:
        for _ in range(2):
            group.all_reduce(on_meta(10))
            group.broadcast(on_meta(10), root=1)
            group.all_gather(on_meta(9))
            group.reduce_scatter(on_meta(9))
        assert names(group) == ["allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base"] * 2
        carried = ("all_reduce nccl", "broadcast nccl", "all_gather nccl", "reduce_scatter nccl")
        assert group.counters == dict.fromkeys(carried, 2)
        assert group.bytes_moved == {"all_reduce": 80, "broadcast": 80, "all_gather": 72, "reduce_scatter": 72}

    run(on_rank)


def test_shards_of_different_sizes_are_launched_as_lists() -> None:
    def on_rank(group: Group) -> None:
        shares = Shares.of([6, 3, 1])
        op = CollectiveOp(Collective.REDUCE_SCATTER, torch.float32, shares=shares)
        group.start(op, on_meta(10), LISTS, may_run_here=True).wait()
        (name, outputs, inputs, _), *_ = fake_of(group).calls
        assert name == "reduce_scatter"
        assert [shard.numel() for shard in inputs[0]] == [6, 3, 1]
        assert outputs[0].numel() == (6, 3, 1)[group.rank]

    run(on_rank)


def test_wait_has_the_stream_wait_and_not_the_host() -> None:
    def on_rank(group: Group) -> None:
        group.all_reduce(on_meta(10))
        work = group.all_reduce(on_meta(10), wait=False)
        assert isinstance(work, StreamWork)
        assert isinstance(work.launched, FakeStreamTask)
        assert work.launched.waits == 0
        work.wait()
        assert work.launched.waits == 1

    run(on_rank)


def test_known_calls_ask_neither_the_tuner_nor_the_coordinator() -> None:
    def on_rank(group: Group) -> None:
        control = group.endpoint.control
        assert group.launch_known(SUM, on_meta(10)) is None
        group.all_reduce(on_meta(10))
        before, arrivals = group.tuner, control.received
        group.tuner = None
        for _ in range(200):
            assert group.launch_known(SUM, on_meta(10))
        group.tuner = before
        assert control.received == arrivals, "a rank waits for no answer"
        assert group.counters == {"all_reduce nccl": 201}
        assert group.launch_known(SUM, on_meta(11)) is None, "another length"
        assert group.launch_known(SUM, torch.empty(10)) is None, "another device"
        assert group.launch_known(SUM, on_meta(20)[::2]) is None, "not contiguous"
        group.barrier()  # a rank that leaves is told to the others

    run(on_rank)


def test_known_calls_between_two_tensors_are_launched_on_both() -> None:
    def on_rank(group: Group) -> None:
        full, shard = on_meta(9), on_meta(3)
        gather = AllGatherInto(full=full, shard=shard, rank=group.rank, world_size=RANKS)
        scatter = ReduceScatterInto(shard=shard, full=full, reduce_op="avg", rank=group.rank, world_size=RANKS)
        for call in (gather, scatter):
            assert group.launch_known(call.op, full, shard) is None
            group.start_into(call, may_run_here=False).wait()
            assert group.launch_known(call.op, full, shard)
            assert group.launch_known(call.op, full) is None, "in place is another call"
        assert names(group) == ["_allgather_base"] * 2 + ["_reduce_scatter_base"] * 2
        assert all(call[1] is not call[2] for call in fake_of(group).calls)

    run(on_rank)


def test_a_call_that_its_caller_waits_for_runs_on_the_stream_of_the_caller() -> None:
    def on_rank(group: Group) -> None:
        for wait in (True, True, False):
            group.all_reduce(on_meta(10), wait=wait)
        assert fake_of(group).async_ops == [True, False, True], "only known calls take the short way"

    run(on_rank)


def test_first_call_of_a_kind_is_compared_before_it_is_launched() -> None:
    def on_rank(group: Group) -> None:
        with pytest.raises(MismatchError, match="ranks disagree"):
            group.all_reduce(on_meta(1000 if group.rank == 1 else 10))
        assert names(group) == []

    run(on_rank)


def test_known_calls_in_another_order_are_found_within_sixteen() -> None:
    def on_rank(group: Group) -> None:
        def all_reduce_often() -> None:
            for number in range(19):
                is_max = number == 1 or (number == 2 and group.rank == 1)
                group.all_reduce(on_meta(10), "max" if is_max else "sum")
                time.sleep(0.05)  # the coordinator's answer is on its way

        with pytest.raises(MismatchError, match=r"call number 3: .*\((max|sum)\)"):
            all_reduce_often()

    run(on_rank)


def test_calls_after_close_are_refused() -> None:
    def on_rank(group: Group) -> None:
        group.all_reduce(on_meta(10))
        group.close()
        with pytest.raises(UserError, match=r"call run\.close last"):
            group.all_reduce(on_meta(10))

    run(on_rank)


def test_tensors_of_cpus_do_not_go_to_nccl() -> None:
    def on_rank(group: Group) -> None:
        tensor = torch.full((10,), float(group.rank + 1))
        group.all_reduce(tensor)
        assert tensor.tolist() == [6.0] * 10
        assert group.counters == {"all_reduce gloo": 1}
        assert names(group) == []

    run(on_rank)
