"""`mimatrix.Hybrid`: what all ranks must agree on before training."""

import pytest
from support.hybrid_groups import BATCH
from torch._C._distributed_c10d import HashStore

import mimatrix
from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.hybrid.mode import Hybrid


def test_ranks_with_different_modes_are_refused() -> None:
    store = HashStore()
    Hybrid(policy="plain")._check_same(store, 0)
    Hybrid(policy="plain")._check_same(store, 1)
    with pytest.raises(UserError, match=r"rank 1 was given the mode .*local.* and rank 0 .*plain.*give all ranks"):
        Hybrid(policy="local")._check_same(store, 1)
    with pytest.raises(UserError, match="give all ranks the same"):
        Hybrid(groups=[[0], [1]], policy="plain")._check_same(store, 1)


def test_groups_of_script_and_launcher_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.GROUPS.name, "[[0, 1], [2]]")
    assert Hybrid(groups=[[0, 1], [2]]).resolve_groups(HashStore(), 0, 3) == ((0, 1), (2,))
    with pytest.raises(UserError, match="the script has groups 0/1,2 and the job was started with 0,1/2"):
        Hybrid(groups=[[0], [1, 2]]).resolve_groups(HashStore(), 0, 3)
    with pytest.raises(UserError, match='started with --groups, and mode="sync" has none'):
        mimatrix.init(BATCH)
