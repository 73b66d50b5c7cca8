"""How groups find each other."""

import pytest
from torch._C._distributed_c10d import HashStore

from mimatrix.core.errors import UserError, WorldError
from mimatrix.hybrid.net import Address
from mimatrix.hybrid.policy import make_policy
from mimatrix.hybrid.rendezvous import Rendezvous, RendezvousInfo


def test_a_group_that_does_not_join_is_named() -> None:
    rendezvous = Rendezvous(
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


def test_rendezvous_info_has_a_version() -> None:
    info = RendezvousInfo("secret", (Address("10.0.0.1", 7), Address("10.0.0.2", 8)), "SGD on 9 elements")
    assert RendezvousInfo.from_json(info.to_json()) == info
    with pytest.raises(UserError, match="another version of MiMatrix"):
        RendezvousInfo.from_json('["secret", [["10.0.0.1", 7]], "SGD on 9 elements"]')
