import time

import pytest
import torch
from support.ranks import in_groups

from mimatrix.comm import AlgorithmChoice, Group
from mimatrix.core.errors import PeerLost


def test_flag_sync_names_the_rank_that_others_wait_for_indirectly() -> None:
    """In a ring rank 0 waits for rank 3, that for 2, that for 1, which does something else: all must name 1."""

    def each(group: Group) -> int:
        if group.rank == 1:
            time.sleep(3)
            return 1
        with pytest.raises(PeerLost, match="rank 1 on here was lost") as lost:
            group.all_reduce(torch.ones(8), choice=AlgorithmChoice("windows", "ring"))
        return lost.value.rank

    assert in_groups(4, each, timeout_s=0.5) == [1, 1, 1, 1]
