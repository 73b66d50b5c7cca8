"""What moving a model costs on described clusters, against closed forms."""

import time

import pytest

from mimatrix.cluster import load_cluster
from mimatrix.planner.communication import COSTS, simulate_communication

MB = 10**6


def test_a_star_is_priced_by_its_links() -> None:
    """Each rank sends and receives 2(P-1)/P of the message: 100 Gbit are 12.5 GB a second."""
    cluster = load_cluster("star:8,rate=100Gbit")
    found = simulate_communication(cluster, 500 * MB, tuple(range(8)))
    wires = 2 * 7 / 8 * 500 * MB / 12.5e9
    assert wires < found.once_s[0] < 1.02 * wires + 16 * COSTS.sync_s
    assert found.once_s[1] == pytest.approx(found.once_s[0])
    assert found.round_s[3] == pytest.approx(1.5 * found.once_s[0])
    assert " by gdraa (simulated)" in found.reason


def test_some_of_the_devices_pay_for_their_own_links() -> None:
    """The device on the slow link is the last one: without it the others are quick."""
    cluster = load_cluster("star:4,rate=3*100Gbit+1*1Gbit")
    all_four = simulate_communication(cluster, 100 * MB, (0, 1, 2, 3))
    without = simulate_communication(cluster, 100 * MB, (0, 1, 2))
    assert all_four.once_s[0] > 20 * without.once_s[0]
    assert simulate_communication(cluster, 100 * MB, (0, 3)).once_s[0] > 20 * without.once_s[0]


def test_uneven_links_have_uneven_shares() -> None:
    found = simulate_communication(load_cluster("examples/lab.toml"), 500 * MB, (0, 1, 2, 3))
    assert "gdraa with shares by bandwidth" in found.reason


def test_one_device_moves_nothing() -> None:
    assert simulate_communication(load_cluster("star:4"), MB, (2,)).once_s == (0.0,) * 4


def test_larger_models_and_more_devices_take_longer() -> None:
    cluster = load_cluster("leaf_spine:2x4,oversubscription=2")
    times = [
        simulate_communication(cluster, size * MB, tuple(range(ranks))).once_s[0]
        for size in (10, 100)
        for ranks in (2, 8)
    ]
    assert times[0] < times[1] < times[3]
    assert times[0] < times[2] < times[3]


def test_sixty_four_devices_are_quick() -> None:
    cluster = load_cluster("leaf_spine:8x8")
    began = time.process_time()
    simulate_communication(cluster, 500 * MB, tuple(range(64)))
    assert time.process_time() - began < 5, "about 0.6 s on a quiet machine"
    began = time.process_time()
    simulate_communication(cluster, 500 * MB, tuple(range(64)))
    assert time.process_time() - began < 0.1, "asked again it is remembered"
