"""Two sites with a slow link between them: what is made of the records of groups; and one short round in the lab."""

import os
import shutil
from dataclasses import replace

import pytest

from bench.hybrid.sites import WAYS, SitesResult, gradient_bytes, measure, predict, section
from bench.hybrid.sites_worker import BATCH, GroupRecord

ABLE = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


def test_groups_are_counted_while_all_of_them_train() -> None:
    first = GroupRecord([1.0, 2.0, 3.0, 4.0], [], [(1.0, 10.0), (2.0, 50.0), (4.0, 80.0)])
    found = SitesResult.of([first, GroupRecord([2.0, 2.5, 3.0], [1.0, 2.0, 3.0])])
    assert found.samples == 7 * BATCH
    assert found.staleness == 2.0
    assert found.samples_per_s == 3 * BATCH
    assert found.curve == ((0.0, 3 * BATCH, 50.0), (2.0, 7 * BATCH, 80.0))
    assert (found.seconds_to(60.0), found.seconds_to(90.0)) == (2.0, None)


def test_the_link_carries_what_algorithms_send() -> None:
    size = gradient_bytes()
    ring, hierarchical, hybrid, local, rounds = (predict(way, size) for way in WAYS.values())
    assert ring["bytes"] == pytest.approx(1.5 * size / BATCH, rel=1e-3)
    assert hierarchical["bytes"] == pytest.approx(size / BATCH, rel=1e-3)
    assert hybrid["bytes"] == pytest.approx(size / BATCH)
    assert local["bytes"] == rounds["bytes"] == pytest.approx(hybrid["bytes"] / WAYS["local steps (10)"].steps)
    assert ring["samples_per_s"] < hierarchical["samples_per_s"] < local["samples_per_s"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not ABLE, reason="needs root, ip and tc")
def test_all_ways_train_between_the_sites() -> None:
    found = measure(1, {name: replace(way, epochs=1) for name, way in WAYS.items()})
    assert found["ways"].keys() == WAYS.keys()
    for row in found["ways"].values():
        assert row["accuracy"][0] > 30
    assert "local steps" in section(found)
