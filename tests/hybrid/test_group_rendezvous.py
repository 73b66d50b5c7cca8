"""How groups find each other."""

import json

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from mimatrix.core import environment
from mimatrix.core.errors import UserError, WorldError
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import make_policy
from mimatrix.hybrid.rendezvous import GroupRendezvous, RendezvousInfo
from mimatrix.hybrid.server.shard import ParamSpan


def test_a_group_that_does_not_join_is_named() -> None:
    rendezvous = GroupRendezvous(
        store=HashStore(),
        group=0,
        groups=3,
        policy=make_policy("large", 32, {}),
        host="127.0.0.1",
        timeout_s=0.2,
    )
    rendezvous.store.set("address/0", "")
    with pytest.raises(WorldError, match=r"group 1, group 2 did not join within 0.2 s"):
        rendezvous._wait_for_all(rendezvous.store, "address")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the server ends with this process
@pytest.mark.parametrize("secret", ["", "what all ranks of this job know"])
def test_store_has_no_token_of_the_shard_servers_if_ranks_share_a_secret(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(environment.JOB_SECRET.name, secret)
    policy, store = make_policy("large", 32, {}), HashStore()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10))], lr=0.1)
    layout = FlatLayout(optimizer, (), (ParamSpan(0, 0, 10),), torch.float32)
    rendezvous = GroupRendezvous(store=store, group=0, groups=1, policy=policy, host="127.0.0.1", timeout_s=60)
    flat = torch.zeros(10)
    rendezvous.connect(layout, flat).close()
    encoded = json.loads(store.get("hybrid/info"))
    assert bool(encoded["token"]) == (not secret)
    assert store.check(["hybrid/token"]) == (not secret)
    rendezvous.connect(layout, flat).close()  # a group that comes again finds the others


def test_rendezvous_info_has_a_version() -> None:
    info = RendezvousInfo("secret", (Address("10.0.0.1", 7), Address("10.0.0.2", 8)), "SGD on 9 elements")
    assert RendezvousInfo.from_json(info.to_json()) == info
    with pytest.raises(UserError, match="another version of MiMatrix"):
        RendezvousInfo.from_json('["secret", [["10.0.0.1", 7]], "SGD on 9 elements"]')
