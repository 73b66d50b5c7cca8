"""The launcher on a real Ray cluster of three raylets that are not alike: the contract, and what several nodes add."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.launcher_contract import (
    DEAF,
    DONE,
    FOREVER,
    Ground,
    LauncherContract,
    Make,
    codes,
    eventually,
    runs,
)
from support.ray_clusters import RayCluster, ray_cluster

from mimatrix.core.errors import WorldError
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import Member, MemberState, Phase, Team
from mimatrix.launch.ray.auth import ray_environment
from mimatrix.launch.ray.driver_client import Answer, Refused
from mimatrix.launch.ray.launcher import RayLauncher
from mimatrix.launch.ray.messages import decode_part_state, encode_failure, encode_part
from mimatrix.launch.ray.split import FirstFailure, PartState, split
from mimatrix.launch.start_failure import StartError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.timeout(120),
]
HELLO = Path(__file__).parents[1] / "server" / "scripts" / "hello.py"
SPREAD = ("left", "right", "middle", "right")
PID = "import os, sys, time\nprint('pid', os.getpid(), flush=True)\n"


class Kept(RayLauncher):
    """One for all tests: to connect anew takes a second each time."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # Paths of sockets have to be short.
    folder = Path(tempfile.mkdtemp(prefix="mmx-ray-"))
    try:
        with ray_cluster(folder) as found:
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(cluster: RayCluster) -> Iterator[RayLauncher]:
    launcher = Kept(cluster.folder / "server", cluster.address, cluster.environment)
    eventually(lambda: len(launcher.nodes()) == 3, "three nodes")
    yield launcher
    RayLauncher.close(launcher)


@pytest.fixture
def make(shared: RayLauncher) -> Iterator[Make]:
    yield lambda: shared
    for name in shared.states():
        shared.forget(name)


class TestRayLauncher(LauncherContract):
    @pytest.fixture
    def make(self, shared: RayLauncher) -> Iterator[Make]:
        yield lambda: shared
        for name in shared.states():
            shared.forget(name)


@pytest.fixture
def ground(make: Make, tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(make, tmp_path)
    yield ground
    ground.clear()


def spread(ground: Ground, code: str, nodes: tuple[str, ...] = SPREAD, grace_s: float = 10.0) -> Team:
    """Put a member on each of the nodes, in this order, and on its next device where a node comes again."""
    members = [
        Member(node, nodes[:rank].count(node), {"RANK": str(rank), "WHERE": node}) for rank, node in enumerate(nodes)
    ]
    return replace(ground.team(code, grace_s=grace_s), members=tuple(members))


def pids(ground: Ground, team: Team) -> list[int]:
    """Of members that begin with `PID`."""
    ranks = range(len(team.members))
    for rank in ranks:
        eventually(lambda rank=rank: "\n" in ground.output(team.name, rank), f"rank {rank}")  # type: ignore[misc]
    return [int(ground.output(team.name, rank).split()[1]) for rank in ranks]


def test_nodes_are_what_ray_and_labels_say(shared: RayLauncher) -> None:
    nodes = {node.name: node for node in shared.nodes()}
    assert {name: (node.address, node.rack) for name, node in nodes.items()} == {
        "left": ("127.0.0.2", "rack-1"),
        "middle": ("127.0.0.3", "rack-2"),
        "right": ("127.0.0.4", "rack-2"),
    }
    kinds = {name: [device.kind for device in node.devices] for name, node in nodes.items()}
    assert kinds == {"left": ["cpu"], "middle": ["cpu"], "right": ["a40"] * 2}


def ended_for(rank: int) -> ExitCause:
    return ExitCause(kind=ExitKind.SIGNALED, signal=signal.SIGTERM, ended_for=EndedFor.PEER, because_of=rank)


def test_a_team_over_nodes_keeps_its_ranks(ground: Ground) -> None:
    team = spread(ground, "import os\nprint(os.environ['RANK'], os.environ['WHERE'])")
    ground.launcher.start(team)
    assert ground.ended(team.name).members == (DONE,) * 4
    assert [ground.output(team.name, rank) for rank in range(4)] == [f"{rank} {SPREAD[rank]}\n" for rank in range(4)]


def test_a_group_that_is_alone_on_its_node_returns(ground: Ground, tmp_path: Path) -> None:
    """Also one that is told to end while it waits for that."""
    (tmp_path / "word").touch()
    code = (
        "import os, sys, time\n"
        "print('life', os.environ['MIMATRIX_REJOINS'], flush=True)\n"
        "if os.environ['RANK'] == '1': sys.exit(3)\n"
        "time.sleep(600)"
    )
    team = spread(ground, code, ("left", "right"))
    ground.launcher.start(replace(team, groups=((0,), (1,)), restarts=9, restart_after=str(tmp_path / "word")))
    eventually(lambda: "life 2" in ground.output(team.name, 1), "the second return")
    ground.launcher.end(team.name)
    state = ground.ended(team.name)
    assert state.members[0].code == -signal.SIGTERM
    lives = ground.output(team.name, 1)
    assert "life 4" not in lives
    time.sleep(1.0)
    assert ground.output(team.name, 1) == lives


def test_a_failure_on_one_node_ends_the_others(ground: Ground) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(7)\ntime.sleep(600)"
    team = spread(ground, code)
    ground.launcher.start(team)
    state = ground.ended(team.name)
    assert state.first_failure == 3
    assert codes(state) == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGTERM, 7]
    assert [member.cause for member in state.members] == [*[ended_for(3)] * 3, ExitCause.from_returncode(7)]


def test_a_failure_ends_the_others_while_nobody_looks(ground: Ground, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = (
        f"{PID}while not (os.path.exists({str(gate)!r}) and os.environ['RANK'] == '2'): time.sleep(0.01)\nsys.exit(4)"
    )
    team = spread(ground, code)
    ground.launcher.start(team)
    members = pids(ground, team)
    gate.touch()
    eventually(lambda: not any(map(runs, members)), "the end of all")
    state = ground.ended(team.name)
    assert (state.first_failure, codes(state)[2]) == (2, 4)
    assert state.members[0].cause == ended_for(2)


def test_what_one_node_cannot_start_no_node_starts(ground: Ground, cluster: RayCluster) -> None:
    team = spread(ground, FOREVER)
    # A file where one of the nodes is about to make a folder.
    obstacle = next(cluster.folder.glob("nodes/*/*")) / "parts" / team.name
    obstacle.parent.mkdir(exist_ok=True)
    obstacle.touch()
    try:
        with pytest.raises(WorldError, match="cannot be started"):
            ground.launcher.start(team)
    finally:
        obstacle.unlink()
    assert ground.launcher.states() == {}
    ground.launcher.start(team)
    assert len(ground.state(team.name).members) == 4


@pytest.mark.wording
def test_a_start_that_was_given_up_does_not_begin_late(ground: Ground, shared: RayLauncher) -> None:
    team = spread(ground, FOREVER, nodes=("middle",))
    nodes, own_names = shared.find_nodes()
    parts = split(team, nodes, own_names, "order-1")
    (node,) = parts
    shared.driver.ask({node: {"team": team.name, "start_id": "order-1"}}, "drop")
    late = shared.driver.ask({node: {"part": encode_part(parts[node])}}, "start", archive=team.archive)[node]
    assert isinstance(late, Refused)
    assert "was abandoned before it came to middle" in str(late.error)
    ground.launcher.start(team)
    assert ground.state(team.name).members == (MemberState(Phase.RUNNING),)


def test_a_part_that_comes_after_the_failure_ends_while_nobody_looks(ground: Ground, shared: RayLauncher) -> None:
    team = spread(ground, FOREVER, nodes=("middle",))
    nodes, own_names = shared.find_nodes()
    parts = split(team, nodes, own_names, "order-2")
    (node,) = parts
    failure = FirstFailure(7, time.time())
    shared.driver.ask({node: {"team": team.name, "now": False, "failure": encode_failure(failure)}}, "end")
    shared.driver.ask({node: {"part": encode_part(parts[node])}}, "start", archive=team.archive)

    def part() -> PartState:
        reply = shared.driver.ask({node: {"teams": [team.name]}}, "states")[node]
        assert isinstance(reply, Answer)
        state = decode_part_state(reply.value[team.name])
        assert state
        return state

    eventually(lambda: part().team.has_ended, "the end of the part")
    assert (part().failure, codes(part().team)) == (failure, [-signal.SIGTERM])
    shared.driver.ask({node: {"team": team.name, "start_id": "order-2"}}, "drop")


def test_ending_reaches_all_nodes(ground: Ground) -> None:
    team = spread(ground, PID + DEAF)
    ground.launcher.start(team)
    members = pids(ground, team)
    ground.launcher.end(team.name)
    ground.launcher.end(team.name, now=True)
    state = ground.ended(team.name)
    assert codes(state) == [-signal.SIGKILL] * 4
    assert state.first_failure is None
    assert not any(map(runs, members))


def test_a_launcher_of_another_process_knows_the_teams(ground: Ground, cluster: RayCluster) -> None:
    team = spread(ground, PID + "time.sleep(600)")
    ground.launcher.start(team)
    members = pids(ground, team)
    other = RayLauncher(cluster.folder / "server", cluster.address, cluster.environment)
    try:
        assert other.states()[team.name].members == (MemberState(Phase.RUNNING),) * 4
        assert f"pid {members[3]}" in other.read_log(team.name, 3, 0).data.decode()
        other.end(team.name)
        eventually(lambda: other.states()[team.name].has_ended, "the end")
    finally:
        other.close()
    assert all(map(runs, members)) is False


def test_places_do_not_see_one_another(ground: Ground, cluster: RayCluster) -> None:
    ground.start(FOREVER)
    other = RayLauncher(cluster.folder / "another", cluster.address, cluster.environment)
    assert other.states() == {}
    other.close()


def test_a_lost_connection_is_made_again(ground: Ground) -> None:
    ground.start(FOREVER)
    drivers = [
        pid for pid in _children(os.getpid()) if b"launch.ray.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert drivers
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: _answers(ground), "an answer")
    assert ground.state("job-1.g0").members == (MemberState(Phase.RUNNING),)


def _answers(ground: Ground) -> bool:
    try:
        return bool(ground.launcher.nodes())
    except WorldError:
        return False


@pytest.mark.parametrize("wrong", ["token", "address"])
def test_what_cannot_be_reached_is_one_sentence(cluster: RayCluster, tmp_path: Path, wrong: str) -> None:
    token = tmp_path / "token"
    token.write_text("f" * 32)
    environment, address = cluster.environment, cluster.address
    if wrong == "token":
        environment["RAY_AUTH_TOKEN_PATH"] = str(token)
    else:
        address = "127.0.0.2:9"
    launcher = RayLauncher(tmp_path, address, ray_environment(tmp_path, environment))
    began_s = time.monotonic()
    with pytest.raises(WorldError, match="cannot be used") as raised:
        launcher.nodes()
    assert "\n" not in str(raised.value)
    assert time.monotonic() - began_s < 20
    launcher.close()


@pytest.fixture
def served(cluster: RayCluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a job server on the cluster, and yield the environment of its commands."""
    data = tmp_path / "data"
    environment = cluster.environment | {"MIMATRIX_DATA": str(data), "COLUMNS": "200"}
    words = ["up", "--launcher", "ray", "--address", cluster.address, "--port", "0", "--data", str(data)]
    words[words.index("0")] = str(_free_port())
    with (
        (tmp_path / "server.log").open("wb") as log,
        subprocess.Popen(_mimatrix(*words), env=environment, stdout=log, stderr=log) as server,
    ):
        eventually_s = time.monotonic() + 30
        while not (data / "address").is_file():
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < eventually_s
            time.sleep(0.1)
        yield environment
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)


@pytest.mark.wording
def test_a_job_of_the_server_runs_on_all_nodes(served: dict[str, str]) -> None:
    submitted = _command(served, "submit", str(HELLO), "--devices", "cpu:2,a40:1", "--", "--lr", "0.1")
    waited = _command(served, "wait", "1")
    assert "job 1 is done: all ranks ended well" in waited, submitted + waited
    for rank in range(3):
        assert _command(served, "logs", "1", "--rank", str(rank)) == f"rank {rank} of 3 --lr 0.1\n"
    (written,) = Path(served["MIMATRIX_DATA"]).glob("ray/teams/*.json")
    assert {place["node"] for place in json.loads(written.read_text())["locations"]} == {"left", "middle", "right"}


def _mimatrix(*words: str) -> list[str]:
    return [sys.executable, "-m", "mimatrix.cli.main", *words]


def _command(environment: dict[str, str], *words: str) -> str:
    done = subprocess.run(_mimatrix(*words), env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_agent_that_is_killed_takes_its_part_with_it(ground: Ground, cluster: RayCluster) -> None:
    team = spread(ground, PID + DEAF, grace_s=0.5)
    ground.launcher.start(team)
    members = pids(ground, team)
    for agent in cluster.agents("right"):
        os.kill(agent, signal.SIGKILL)
    state = ground.ended(team.name)
    assert state.first_failure == 1
    assert codes(state) == [-signal.SIGKILL] * 4
    assert not any(map(runs, members))
    eventually(lambda: len(ground.launcher.nodes()) == 3, "another agent")
    assert "pid" in ground.output(team.name, 1)


def test_a_node_that_is_lost_loses_its_members(ground: Ground, cluster: RayCluster) -> None:
    """The last test here: the node does not come back."""
    team = spread(ground, PID + "time.sleep(600)")
    ground.launcher.start(team)
    members = pids(ground, team)
    os.kill(cluster.raylet("right"), signal.SIGKILL)
    state = ground.ended(team.name)
    assert state.first_failure == 1
    assert [member.phase for member in state.members] == [Phase.EXITED, Phase.LOST, Phase.EXITED, Phase.LOST]
    lost = state.members[1].cause
    assert lost
    assert lost.kind is ExitKind.LOST
    assert lost.detail.startswith("node right is gone")
    assert state.members[0].cause == ended_for(1)
    eventually(lambda: not any(map(runs, members)), "the end of those whom Ray did not start")
    assert {node.name for node in ground.launcher.nodes()} == {"left", "middle"}
    with pytest.raises(WorldError, match="node right does not answer"):
        ground.launcher.read_log(team.name, 1, 0)
    with pytest.raises(StartError, match="right") as raised:
        ground.launcher.start(replace(team, name="another"))
    assert raised.value.is_transient, "it may return"
    ground.launcher.forget(team.name)
    assert ground.launcher.states() == {}
