"""A start on Ray that fails is undone without holding up the look at other teams."""

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.launcher_contract import pack

from mimatrix.core.errors import WorldError
from mimatrix.launch import Member, StartError, Team
from mimatrix.launch.devices import NodeInfo, cores
from mimatrix.launch.ray.driver_client import Answer, NodeReply, Silent
from mimatrix.launch.ray.launcher import RayLauncher
from mimatrix.launch.ray.nodes import Raylet
from mimatrix.launch.team_json import encode_node


class SilentNode:
    """Says what it is, and nothing to a start; the first that tells it to drop something waits."""

    def __init__(self) -> None:
        self.dropping, self.go = threading.Event(), threading.Event()

    def raylets(self) -> tuple[Raylet, ...]:
        return (Raylet("n1", "here", "127.0.0.1", True, {}, {}, ""),)

    def ask(self, calls: Mapping[str, Any], method: str, *given: Any, **more: Any) -> dict[str, NodeReply]:
        if method == "describe":
            return {"n1": Answer(encode_node(NodeInfo("here", "127.0.0.1", cores(1))))}
        if method == "drop" and not self.dropping.is_set():
            self.dropping.set()
            assert self.go.wait(20)
        elif method == "drop":
            raise WorldError("it is silent")
        return {node: Silent("no answer") for node in calls}

    def close(self) -> None:
        pass


@pytest.mark.timeout(60)
def test_other_teams_are_looked_at_while_a_start_is_undone(tmp_path: Path) -> None:
    launcher, node = RayLauncher(tmp_path / "place"), SilentNode()
    (tmp_path / "place" / "teams").mkdir(parents=True)
    launcher.__dict__["driver"] = node
    archive = pack(tmp_path / "job.tar.gz", {"a": "b"})
    team = Team(name="job-1.1", command=(sys.executable,), members=(Member("here", 0),), archive=archive)
    raised: list[Exception] = []
    looked = threading.Event()

    def start() -> None:
        try:
            launcher.start(team)
        except StartError as error:
            raised.append(error)

    def look() -> None:
        launcher.states()
        looked.set()

    starter = threading.Thread(target=start)
    starter.start()
    assert node.dropping.wait(20)
    looker = threading.Thread(target=look)
    looker.start()
    assert looked.wait(10), "the look waits for the start"
    node.go.set()
    starter.join(20)
    looker.join(20)
    assert len(raised) == 1
    assert launcher.states() == {}, "it counts as gone, and is dropped when its node answers"
