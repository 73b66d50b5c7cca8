"""Which address a rank takes, as a decision, and what Gloo and NCCL are told."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.ranks import together
from torch._C._distributed_c10d import HashStore, PrefixStore

from mimatrix.comm.addresses import (
    HostAddress,
    PeerRoute,
    choose_address,
    create_gloo,
    find_route,
    own_address,
    set_nccl_interface,
)
from mimatrix.core.errors import UserError

LOOPBACK = HostAddress("a", "127.0.1.1")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIMATRIX_ADDRESS", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def routes(**by_peer: str) -> Callable[[str], str]:
    """Return a function that knows the routes to some peers, written `to_10_0_0_2="10.0.0.1"`."""

    def route_to(peer: str) -> str:
        try:
            return by_peer["to_" + peer.replace(".", "_")]
        except KeyError:
            raise OSError("network is unreachable") from None

    return route_to


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        # Its own address is one that others reach: there is nothing to ask.
        ([HostAddress("a", "10.0.0.1"), HostAddress("b", "127.0.0.1")], "10.0.0.1"),
        ([HostAddress("a", "10.0.0.1"), HostAddress("b", "10.0.0.2")], "10.0.0.1"),
        # The case of rank 0 whose own name is MASTER_ADDR.
        ([LOOPBACK, HostAddress("b", "10.0.0.2")], "10.0.0.9"),
        ([LOOPBACK, HostAddress("a", "127.0.0.1"), HostAddress("b", "10.0.0.2")], "10.0.0.9"),
        # A peer to which there is no route is passed over, as is one that is reached through loopback.
        ([LOOPBACK, HostAddress("b", "172.16.0.2"), HostAddress("c", "10.0.0.2")], "10.0.0.9"),
        ([LOOPBACK, HostAddress("b", "fd00::2"), HostAddress("c", "10.0.0.2")], "10.0.0.9"),
        ([LOOPBACK, HostAddress("b", "10.0.0.5"), HostAddress("c", "10.0.0.2")], "10.0.0.9"),
        # One host, or several that all have loopback addresses: ranks that play hosts on one machine.
        ([LOOPBACK], "127.0.1.1"),
        ([LOOPBACK, HostAddress("a", "10.0.0.2")], "127.0.1.1"),
        ([LOOPBACK, HostAddress("b", "127.0.0.1"), HostAddress("c", "::1")], "127.0.1.1"),
        ([LOOPBACK, HostAddress("b", "172.16.0.2")], "127.0.1.1"),
    ],
)
def test_address_of_a_rank_is_that_of_the_route_to_other_hosts(ranks: list[HostAddress], wanted: str) -> None:
    assert choose_address(ranks, 0, routes(to_10_0_0_2="10.0.0.9", to_10_0_0_5="127.0.0.1")) == wanted


def test_a_rank_that_is_not_the_first_asks_for_itself() -> None:
    ranks = [HostAddress("a", "10.0.0.2"), HostAddress("b", "127.0.0.1")]
    assert choose_address(ranks, 1, routes(to_10_0_0_2="10.0.0.9")) == "10.0.0.9"


def test_own_address_is_given_or_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MIMATRIX_ADDRESS", "10.0.0.7")
    assert own_address() == "10.0.0.7"


def test_routes_are_found_through_the_store() -> None:
    store = HashStore()
    found = together(3, lambda rank: find_route(store, rank, 3, "here"))
    assert found == [PeerRoute("127.0.0.1", spans_hosts=False)] * 3
    found = together(3, lambda rank: find_route(PrefixStore("hosts", store), rank, 3, f"host{rank % 2}"))
    assert found == [PeerRoute("127.0.0.1", spans_hosts=True)] * 3


def test_a_rank_that_does_not_publish_its_address_is_waited_for_as_long_as_the_store_says() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="timeout"):
        find_route(store, 0, 2, "here")


@pytest.mark.parametrize("variables", [{}, {"GLOO_SOCKET_IFNAME": "lo"}])
def test_gloo_listens_where_it_is_told(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # An interface that the user has named has precedence over an address, even one that this machine does not have.
    address = "192.0.2.77" if variables else "127.0.0.1"
    store = HashStore()

    def reduce(rank: int) -> tuple[float, Any]:
        gloo: Any = create_gloo(PrefixStore("gloo", store), rank, 2, timedelta(seconds=17), address)
        tensor = torch.tensor([rank + 1.0])
        gloo.allreduce([tensor]).wait()
        return float(tensor), gloo.options._timeout

    assert together(2, reduce) == [(3.0, timedelta(seconds=17))] * 2


def test_an_address_that_this_machine_does_not_have_is_told() -> None:
    with pytest.raises(UserError, match=r"rank 0 cannot listen on 192\.0\.2\.77 .*; set MIMATRIX_ADDRESS"):
        create_gloo(HashStore(), 0, 1, timedelta(seconds=5), "192.0.2.77")


@pytest.mark.parametrize(
    ("route", "before", "after"),
    [
        (PeerRoute("127.0.0.1", spans_hosts=True), {}, {"NCCL_SOCKET_IFNAME": "=lo"}),
        (PeerRoute("127.0.0.1", spans_hosts=False), {}, {}),
        (PeerRoute("192.0.2.77", spans_hosts=True), {}, {}),
        (PeerRoute("127.0.0.1", spans_hosts=True), {"NCCL_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0"}),
    ],
)
def test_nccl_uses_the_interface_to_the_peers(route: PeerRoute, before: dict[str, str], after: dict[str, str]) -> None:
    variables = dict(before)
    set_nccl_interface(route, variables)
    assert variables == after


def test_nccl_is_not_told_loopback_for_an_address_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimatrix.comm.addresses.interface_of", lambda _: "lo")
    variables: dict[str, str] = {}
    set_nccl_interface(PeerRoute("10.0.0.1", spans_hosts=True), variables)
    assert variables == {}
