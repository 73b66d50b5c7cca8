"""Every raylet in a network namespace of its own, with shaped links in between: what several machines would see."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ray_clusters import Machine, ray_cluster

from mimatrix.cluster import load_cluster
from mimatrix.lab import Lab, down, namespace, up

NAME = "raytest"
SCRIPT = Path(__file__).parent / "ray_in_namespaces.py"


def _missing() -> str:
    """Return what keeps this test from running, or an empty string if it can run."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs ip and tc"
    return "" if os.geteuid() == 0 else "needs root"


MISSING = _missing()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "everything is there"),
    pytest.mark.timeout(180),
]


@pytest.fixture
def lab() -> Iterator[Lab]:
    down(NAME)
    yield up(load_cluster("star:3,rate=2*1Gbit+200Mbit"), NAME)
    down(NAME)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="mmx-ray-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_three_machines_one_of_which_is_cut_off(lab: Lab, folder: Path) -> None:
    spaces = [namespace(NAME, seat.node) for seat in lab.layout.seats]
    machines = [
        Machine(seat.node, seat.address, ("--num-cpus", "1"), ("ip", "netns", "exec", space))
        for seat, space in zip(lab.layout.seats, spaces, strict=True)
    ]
    cut = ["ip", "-n", spaces[2], "link", "set", "dev", lab.layout.seats[2].interface, "down"]
    with ray_cluster(folder, machines, port=6379) as cluster:
        inside = ["ip", "netns", "exec", spaces[0], sys.executable, str(SCRIPT), str(folder), cluster.address, *cut]
        done = subprocess.run(inside, env=cluster.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.stdout.write(done.stdout)
