"""Shares by bandwidth on uneven NICs, and what a timeline says."""

import json
from itertools import pairwise, product
from pathlib import Path

import pytest

from mimatrix.cluster import Fabric, load_cluster, topology_from_name
from mimatrix.collectives import CATALOG, Collective, FitOptions, fit
from mimatrix.core.errors import UnsuitedError, UserError
from mimatrix.netsim import Costs, Timeline, Traffic, run, simulate
from mimatrix.netsim.drawing import draw_timeline, link_use
from mimatrix.netsim.trace import chrome_trace

SIZE = 64 << 20
UNEVEN = "star:4,rate=2*40Gbit+2*10Gbit"
SLOW = 10e9 / 8


def seconds(algorithm: str, options: FitOptions = FitOptions()) -> float:  # noqa: B008 (a value)
    found, _ = simulate(algorithm, Fabric(topology_from_name(UNEVEN)), Collective.ALL_REDUCE, SIZE, options, Costs())
    return found.seconds


def timeline(algorithm: str, cluster: str) -> Timeline:
    fabric = Fabric(topology_from_name(cluster))
    fitted = fit(algorithm, fabric, Collective.ALL_REDUCE)
    return run(Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes), SIZE)


def test_shares_by_bandwidth_reach_the_bound_of_the_slow_nic() -> None:
    shared = seconds("gdraa", FitOptions(segments=16, shares="bandwidth"))
    assert SIZE / SLOW <= shared <= 1.10 * SIZE / SLOW
    assert seconds("ring") >= 1.35 * shared
    assert seconds("gdraa", FitOptions(segments=16)) >= 1.35 * shared
    assert seconds("gdraa") >= 1.35 * shared


def test_one_segment_gains_nothing_from_shares() -> None:
    assert seconds("gdraa", FitOptions(shares="bandwidth")) == pytest.approx(seconds("gdraa"), rel=1e-9)


def test_a_timeline_names_the_bottleneck() -> None:
    found = timeline("ring", UNEVEN)
    assert found.bottleneck_name in ("n2->hub", "n3->hub", "hub->n2", "hub->n3")
    assert found.bottleneck_use > 0.99
    assert "10Gbit) is full" in found.blame()
    idle = timeline("binomial", "star:8")
    assert "no link is full throughout" in idle.blame()


def test_spans_cover_the_time_of_each_rank() -> None:
    found = timeline("halving_doubling", "leaf_spine:2x4")
    for rank in range(8):
        spans = found.spans(rank)
        assert [span.round for span in spans] == list(range(6))
        assert all(a.ended_s <= b.began_s for a, b in pairwise(spans))
        assert all(span.waited_from_s <= span.began_s < span.ended_s for span in spans)
    assert max(found.spans(rank)[-1].ended_s for rank in range(8)) == found.seconds


def test_chrome_trace_has_every_move_and_round() -> None:
    found = timeline("gdraa", "star:4")
    trace = json.loads(json.dumps(chrome_trace(found)))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["tid"] == "reads" for event in complete) == 24
    assert sum(event["tid"] == "rounds" and event["name"].startswith("round") for event in complete) == 8
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(found.seconds * 1e6)


def test_link_use_integrates_to_the_bytes_carried() -> None:
    found = timeline("gdraa", "leaf_spine:2x4,oversubscription=2")
    channels = (found.channel_bytes > 0).nonzero()[0]
    use = link_use(found, channels, 50)
    rates = found.traffic.fabric.rates[channels]
    assert use.mean(axis=1) * rates * found.seconds == pytest.approx(found.channel_bytes[channels], rel=1e-9)


@pytest.mark.parametrize("algorithm", ["gdraa", "ring", "hdrm"])
def test_draws(algorithm: str, tmp_path: Path) -> None:
    figure = draw_timeline(timeline(algorithm, "bigraph:2x2"), algorithm)
    figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    assert len(figure.axes) == 3


@pytest.mark.parametrize(
    "cluster", ["star:6", "leaf_spine:2x4,oversubscription=4", "bigraph:2x4", "torus:3x3", "star:3,devices=2"]
)
@pytest.mark.parametrize("collective", list(Collective))
def test_nothing_beats_the_lower_bound(cluster: str, collective: Collective) -> None:
    fabric = Fabric(topology_from_name(cluster))
    able = [entry.name for entry in CATALOG.values() if collective in entry.collectives]
    ran = set()
    for name, shares in product(able, ("equal", "bandwidth")):
        try:
            found, _ = simulate(name, fabric, collective, SIZE, FitOptions(segments=4, shares=shares), Costs())  # type: ignore[arg-type]
        except UnsuitedError:
            continue
        ran.add(name)
        assert found.seconds >= found.lower_bound_seconds * (1 - 1e-9), name
    assert ran >= set(able) - {"hdrm"}


@pytest.mark.parametrize(
    ("placement", "sentence"),
    [
        ([0, 1, 2], "names 3 devices for 4 ranks"),
        ([0, 1, 1, 2], "name each at most once"),
        ([0, 1, 2, 9], "from 0 to 3"),
    ],
)
def test_refuses_impossible_placements(placement: list[int], sentence: str) -> None:
    fabric = Fabric(topology_from_name("star:4"))
    schedule = fit("ring", fabric, Collective.ALL_REDUCE).schedule
    with pytest.raises(UserError, match=sentence):
        Traffic.of(schedule, fabric, placement)


def test_refuses_more_ranks_than_devices_and_empty_messages() -> None:
    fabric = Fabric(topology_from_name("star:4"))
    with pytest.raises(UserError, match="9 ranks do not fit star:4, which has 4 device"):
        fit("ring", fabric, Collective.ALL_REDUCE, FitOptions(ranks=9))
    with pytest.raises(UserError, match="0 bytes cannot be replayed"):
        run(Traffic.of(fit("ring", fabric, Collective.ALL_REDUCE).schedule, fabric), 0)


def test_a_tolerance_is_close_and_keeps_the_bytes() -> None:
    fabric = Fabric(topology_from_name("fat_tree:4"))
    fitted = fit("gdraa", fabric, Collective.ALL_REDUCE)
    traffic = Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)
    exact, rough = run(traffic, SIZE), run(traffic, SIZE, tolerance=0.02)
    assert exact.seconds * 0.96 <= rough.seconds <= exact.seconds * 1.01
    assert len(set(rough.move_ended_s)) < 0.8 * len(set(exact.move_ended_s)), "no event was saved"
    assert rough.channel_bytes == pytest.approx(exact.channel_bytes, rel=1e-9)
    for nonsense in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match="use 0"):
            run(traffic, SIZE, tolerance=nonsense)


def test_whoever_watches_sees_it_advance() -> None:
    fabric = Fabric(topology_from_name("fat_tree:6"))
    fitted = fit("gdraa", fabric, Collective.ALL_REDUCE)
    seen: list[float] = []
    run(Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes), SIZE, watch=seen.append)
    assert len(seen) > 2
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] <= 1


def test_segments_let_both_fabrics_of_a_hierarchy_work_at_once() -> None:
    """Servers of eight behind one NIC: one segment keeps the NIC idle while the bus works, eight hardly do."""
    fabric = Fabric(topology_from_name("star:4,devices=8"))
    found = {}
    for segments in (1, 8):
        options = FitOptions(segments=segments, inside="ring", between="ring")
        found[segments], _ = simulate("hierarchical", fabric, Collective.ALL_REDUCE, 4 * SIZE, options, Costs())
    assert found[8].seconds < 0.7 * found[1].seconds
    assert found[8].bottleneck_use > 0.8 > found[1].bottleneck_use


def test_shares_by_bandwidth_elsewhere_are_equal_and_say_so() -> None:
    fabric = Fabric(topology_from_name(UNEVEN))
    for name, collective in (("ring", Collective.ALL_REDUCE), ("gdraa", Collective.ALL_GATHER)):
        fitted = fit(name, fabric, collective, FitOptions(shares="bandwidth"))
        assert len(set(fitted.schedule.shares.fractions)) == 1
        assert any("shares by bandwidth are computed for the all_reduce of gdraa only" in why for why in fitted.reasons)


def test_what_an_algorithm_does_not_have_is_said() -> None:
    asked = FitOptions(segments=4, root=1, servers=2, shares="bandwidth")
    reasons = fit("parameter_server", Fabric(topology_from_name("star:4")), Collective.ALL_REDUCE, asked).reasons
    for option in ("segments", "root", "servers", "shares"):
        assert f"ignored: {option}, which parameter_server does not have" in reasons


def test_slow_adding_is_blamed() -> None:
    fabric = Fabric(topology_from_name("star:4"))
    found, _ = simulate("gdraa", fabric, Collective.ALL_REDUCE, SIZE, FitOptions(), Costs(add_bytes_per_s=1e9))
    assert found.blame.startswith("adding takes 93%")


FORWARDING_WITH_NICS = """
[[switch]]
name = "s"
[[node]]
name = "a"
devices = [{ kind = "x", count = 2 }]
bus = { rate = "16GB" }
forwards = true
[[node]]
name = "b"
devices = [{ kind = "x", count = 2 }]
bus = { rate = "16GB" }
[[link]]
between = ["a/0", "s"]
rate = "10Gbit"
[[link]]
between = ["a", "s"]
rate = "10Gbit"
[[link]]
between = ["b", "s"]
rate = "10Gbit"
"""


def test_the_bound_holds_where_a_forwarding_nodes_devices_have_nics(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(FORWARDING_WITH_NICS)
    fabric = Fabric(load_cluster(str(tmp_path / "mixed.toml")))
    for name in ("gdraa", "ring", "hierarchical"):
        found, _ = simulate(name, fabric, Collective.ALL_REDUCE, SIZE, FitOptions(), Costs())
        assert 0 < found.lower_bound_seconds <= found.seconds * (1 + 1e-9)


def test_very_many_segments_are_laid_out_quickly() -> None:
    fitted = fit("gdraa", Fabric(topology_from_name("star:2")), Collective.ALL_REDUCE, FitOptions(segments=40_000))
    assert len(fitted.schedule.rounds) == 40_001
