"""Between hosts: a rank sends and receives as many control messages for a GDRAA among 64 ranks as between two."""

import threading
import time

import pytest
from support.ranks import in_groups
from support.remote_windows import FakeRemoteWindows

from mimatrix.comm import AlgorithmChoice, Group
from mimatrix.comm.control.user_calls import UserCall
from mimatrix.core.errors import DifferentCalls, MismatchError, PeerLost

GDRAA = AlgorithmChoice("windows", "gdraa")


def messages_per_gdraa(ranks: int) -> set[tuple[int, int]]:
    """(sent, received) of every rank for one GDRAA, the wait for its readers included."""
    shared, everyone = FakeRemoteWindows(), threading.Barrier(ranks)

    def each(group: Group) -> tuple[int, int]:
        control, tensor = group.endpoint.control, group.empty(128, kind="remote")
        group.barrier()
        before = control.sent, control.received
        tensor.fill_(float(group.rank))
        group.all_reduce(tensor, choice=GDRAA)
        assert (tensor == sum(range(ranks))).all()
        placed = group.endpoint.arenas["remote"].slot_of(tensor)
        assert placed
        placed[0].wait_readers()
        counted = control.sent - before[0], control.received - before[1]
        everyone.wait(30)  # one that leaves earlier is reported to the others
        return counted

    hosts = [f"host{rank}" for rank in range(ranks)]
    return set(in_groups(ranks, each, hosts=hosts, kinds=lambda: {"remote": shared}))


@pytest.mark.parametrize("ranks", [2, 8, 32, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (4, 16, 64))])
def test_control_messages_per_rank_do_not_grow_with_the_world_size(ranks: int) -> None:
    assert messages_per_gdraa(ranks) == {(3, 3)}


def test_coordinator_load_grows_and_is_counted_apart() -> None:
    shared, loads = FakeRemoteWindows(), {}
    for ranks in (2, 8):

        def each(group: Group, ranks: int = ranks) -> None:
            group.barrier()
            group.all_reduce(group.empty(64, kind="remote").zero_(), choice=GDRAA)
            group.barrier()
            if group.rank == 0:
                loads[ranks] = group.endpoint.control.coordinator_load()["received"]

        in_groups(ranks, each, hosts=[str(rank) for rank in range(ranks)], kinds=lambda: {"remote": shared})
    assert loads[8] > 3 * loads[2]


def test_a_mismatch_between_hosts_is_named_on_every_rank() -> None:
    shared = FakeRemoteWindows()

    def each(group: Group) -> str:
        tensor = group.empty(64 + group.rank // 2, kind="remote")
        with pytest.raises(MismatchError) as caught:
            group.all_reduce(tensor, choice=GDRAA)
        return str(caught.value)

    for text in in_groups(3, each, hosts=["a", "b", "c"], kinds=lambda: {"remote": shared}, timeout_s=10):
        assert "64 float32" in text
        assert "65 float32" in text


def test_user_calls_that_differ_between_hosts_are_named_on_every_rank() -> None:
    shared = FakeRemoteWindows()

    def each(group: Group) -> str:
        evaluate, step = UserCall("run.evaluate", "e", fix="call it on all ranks"), UserCall("optimizer.step", "s")
        own = evaluate if group.rank else step
        with pytest.raises(DifferentCalls) as caught, group.caller.calling(own):
            group.all_reduce(group.empty(64, kind="remote"), choice=GDRAA)  # the same on all ranks
        return str(caught.value)

    hosts = ["a", "b", "c"]
    (text,) = set(in_groups(3, each, hosts=hosts, kinds=lambda: {"remote": shared}, timeout_s=10))
    assert "called run.evaluate (test_coordinator_sync.py, line " in text
    assert " where rank 0 called optimizer.step (test_coordinator_sync.py, line " in text
    assert text.endswith("; call it on all ranks")


def test_a_rank_that_has_ended_is_named_between_hosts_to_who_waits_for_it() -> None:
    shared = FakeRemoteWindows()

    def each(group: Group) -> str:
        if group.rank == 1:
            return ""
        call = UserCall("run.load", "l", place="train.py, line 3")
        with pytest.raises(DifferentCalls) as ended, group.caller.calling(call):
            group.all_reduce(group.empty(8, kind="remote"), choice=GDRAA)
        return str(ended.value)

    texts = in_groups(2, each, hosts=["a", "b"], kinds=lambda: {"remote": shared}, timeout_s=10)
    fix = "make the same calls on all ranks"
    assert texts[0] == f"rank 1 has ended, and rank 0 waits for it in run.load (train.py, line 3); {fix}"


def test_a_rank_that_never_comes_is_named_between_hosts() -> None:
    shared = FakeRemoteWindows()

    def each(group: Group) -> int:
        if group.rank == 1:
            time.sleep(3)
            return 1
        with pytest.raises(
            PeerLost, match=r"rank 1 on b was lost in all_reduce of 8 .* round 0, since .* did not come"
        ) as lost:
            group.all_reduce(group.empty(8, kind="remote"), choice=GDRAA)
        return lost.value.rank

    assert in_groups(3, each, hosts=["a", "b", "c"], kinds=lambda: {"remote": shared}, timeout_s=0.5) == [1, 1, 1]
