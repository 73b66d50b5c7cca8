"""What a rank is told of lost peers and mismatches: only what concerns the groups that it is in."""

import threading
import time

import pytest
import torch
from support.ranks import ARENA_BYTES, together
from torch._C._distributed_c10d import HashStore

from mimatrix.comm import Endpoint, Group
from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.core.errors import MismatchError, PeerLost


def test_a_rank_that_left_is_lost_only_for_peers_that_wait_for_it() -> None:
    store, shared = HashStore(), InProcessWindows()
    left = threading.Event()

    def each(rank: int) -> None:
        endpoint = Endpoint.join(store, rank, 3, {"host": shared}, host="here", arena_bytes=ARENA_BYTES)
        whole, pair = Group.create(endpoint, "all", range(3), timeout_s=10), None
        if rank != 2:
            pair = Group.create(endpoint, "pair", [0, 1], timeout_s=10)
        whole.barrier()
        if pair is None:
            endpoint.close()
            left.set()
            return
        left.wait(10)
        time.sleep(0.2 * rank)
        pair.all_reduce(torch.ones(4))
        with pytest.raises(PeerLost, match=r"rank 2 on here was lost .* it left"):
            whole.all_reduce(torch.ones(4))
        endpoint.close()

    together(3, each)


def test_a_mismatch_in_one_group_does_not_fail_another() -> None:
    store, shared, late = HashStore(), InProcessWindows(), threading.Event()

    def each(rank: int) -> None:
        endpoint = Endpoint.join(store, rank, 4, {"host": shared}, host="here", arena_bytes=ARENA_BYTES)
        pair = Group.create(endpoint, f"pair{rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1], timeout_s=10)
        if rank < 2:
            with pytest.raises(MismatchError):
                pair.all_reduce(torch.ones(4 + rank))
            late.set()
        else:
            late.wait(10)
            time.sleep(0.2 * (rank - 2))
            pair.all_reduce(torch.ones(4))
        endpoint.close()

    together(4, each)


def test_a_lost_rank_of_another_group_does_not_change_who_is_named() -> None:
    """Rank 2 is gone; in the group of 0 and 1 it is 1 that does not come."""
    store, shared = HashStore(), InProcessWindows()

    def each(rank: int) -> None:
        endpoint = Endpoint.join(store, rank, 3, {"host": shared}, host="here", arena_bytes=ARENA_BYTES)
        Group.create(endpoint, "all", range(3), timeout_s=10)
        if rank == 2:
            endpoint.control._stream.close()  # as if it were killed
            return
        pair = Group.create(endpoint, "pair", [0, 1], timeout_s=0.5)
        time.sleep(0.3)
        if rank == 0:
            with pytest.raises(PeerLost, match="rank 1 on here was lost"):
                pair.all_reduce(torch.ones(4))
        else:
            time.sleep(3)
        endpoint.close()

    together(3, each)
