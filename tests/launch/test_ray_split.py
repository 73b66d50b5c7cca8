"""Teams over nodes on paper: cut, put together, judged; nodes from what Ray says; the token; the fence."""

import signal
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError, WorldError
from mimatrix.launch.devices import DeviceInfo, NodeInfo
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import Member, MemberState, Phase, Team, TeamState
from mimatrix.launch.ray.auth import ray_environment
from mimatrix.launch.ray.fencing import Fence
from mimatrix.launch.ray.nodes import Raylet, node_info, tell_apart
from mimatrix.launch.ray.split import (
    ABANDONED_S,
    FirstFailure,
    NodePart,
    NodeReports,
    PartState,
    TeamRecord,
    find_local_failure,
    first_record,
    judge_team,
    split,
)
from mimatrix.launch.ray.store import TeamRecords
from mimatrix.launch.start_failure import StartError

NODES = {known: NodeInfo(name, "10.0.0.1", (DeviceInfo("cpu", 1),) * 2) for known, name in (("a", "n0"), ("b", "n1"))}
OWN = {"a": "n0", "b": "n1"}
TEAM = Team(
    name="job-1.g1",
    command=("x",),
    members=(Member("n1", 0), Member("n0", 0), Member("n1", 1)),
    archive=Path("/srv/job.tar.gz"),
)
UP, DONE = MemberState(Phase.RUNNING), MemberState(Phase.EXITED, ExitCause.from_returncode(0))
FAILED = MemberState(Phase.EXITED, ExitCause.from_returncode(1))
NOW_S = 1000.0


def signaled(number: int, ended_for: EndedFor, because_of: int | None = None) -> MemberState:
    cause = ExitCause(kind=ExitKind.SIGNALED, signal=number, ended_for=ended_for, because_of=because_of)
    return MemberState(Phase.EXITED, cause)


TOLD = signaled(signal.SIGTERM, EndedFor.REQUEST)


def raylet(resources: dict[str, float], labels: dict[str, str] | None = None) -> Raylet:
    return Raylet("a", "n0", "10.0.0.1", True, {"memory": 8 << 30, **resources}, labels or {})


def record(*members: MemberState, **more: object) -> TeamRecord:
    made = replace(first_record(TEAM, split(TEAM, NODES, OWN, "start-1")), has_started=True)
    return replace(made, members=members or made.members, **more)  # type: ignore[arg-type]


def part(*members: MemberState, first: int | None = None, failure: FirstFailure | None = None) -> PartState:
    return PartState(TeamState(members, first), failure)


def judged(before: TeamRecord, sight: NodeReports, age_s: float = 0.0) -> TeamRecord:
    return judge_team(before, sight, age_s, NOW_S)


def test_a_team_is_cut_by_nodes() -> None:
    parts = split(TEAM, NODES, OWN, "start-1")
    assert {known: each.ranks for known, each in parts.items()} == {"b": (0, 2), "a": (1,)}
    assert {known: each.peers for known, each in parts.items()} == {"b": ("a",), "a": ("b",)}
    assert parts["b"].team.members == (Member("n1", 0), Member("n1", 1))
    with pytest.raises(StartError, match='no node "n2" here; those that answer are n0, n1') as raised:
        split(replace(TEAM, members=(Member("n2", 0),)), NODES, OWN, "start-1")
    assert raised.value.is_transient, "a node that does not answer now may do so in a moment"


def test_parts_are_put_together_in_the_order_of_ranks() -> None:
    found = judged(record(), NodeReports(parts={"a": part(UP), "b": part(DONE, UP)}))
    assert found.state == TeamState((DONE, UP, UP))
    assert found.unended() == ("b", "a")


def test_the_first_failure_is_the_earliest_that_any_node_saw() -> None:
    sight = NodeReports(
        parts={"a": part(FAILED, failure=FirstFailure(1, 7.0)), "b": part(TOLD, UP, failure=FirstFailure(2, 6.0))}
    )
    found = judged(record(), sight)
    assert found.state.first_failure == 2
    assert found.members[0] == signaled(signal.SIGTERM, EndedFor.PEER, 2)
    later = judged(found, NodeReports(parts={"b": part(TOLD, TOLD, failure=FirstFailure(0, 1.0))}))
    assert later.state.first_failure == 2, "it stays"
    assert later.state.has_ended


def test_a_node_that_is_gone_loses_those_who_had_not_ended() -> None:
    found = judged(record(DONE, UP, UP), NodeReports(gone={"b": "no heartbeat"}, parts={"a": part(UP)}))
    assert found.members == (DONE, UP, MemberState(Phase.LOST, ExitCause.lost("node n1 is gone (no heartbeat)")))
    assert found.state.first_failure == 2
    assert found.unended() == ("a",)


def test_a_loss_after_the_team_was_told_to_end_is_nobodys_failure() -> None:
    found = judged(record(is_stopping=True), NodeReports(gone={"b": ""}, parts={"a": part(TOLD)}))
    assert found.state.first_failure is None
    assert found.members[1] == TOLD
    assert found.members[0].cause == ExitCause.lost("node n1 is gone")


def test_a_silent_node_is_as_it_was() -> None:
    before = record(UP, UP, UP)
    assert judged(before, NodeReports(parts={"a": part(UP)})) == before


def test_a_node_that_forgot_and_one_whose_agent_was_gone() -> None:
    found = judged(record(), NodeReports(parts={"a": None, "b": part(UP, UP)}))
    assert found.members[1] == MemberState(Phase.LOST, ExitCause.lost("node n0 does not know it any more"))
    assert found.state.first_failure == 1
    killed = signaled(signal.SIGKILL, EndedFor.REQUEST)
    assert judged(record(), NodeReports(parts={"a": part(killed), "b": part(UP, UP)})).state.first_failure == 1


def test_a_launcher_that_was_gone_while_it_started_a_team() -> None:
    half = record(has_started=False)
    sight = NodeReports(parts={"a": None, "b": part(UP, UP)})
    assert judged(half, sight).members == (UP, MemberState(Phase.STARTING), UP)
    late = judged(half, sight, ABANDONED_S)
    assert late.members[1].phase is Phase.LOST
    assert late.state.first_failure == 1
    whole = judged(half, NodeReports(parts={"a": part(UP), "b": part(UP, UP)}), ABANDONED_S)
    assert (whole.has_started, whole.state.first_failure) == (True, None)


def test_a_failure_in_a_part_has_its_rank_in_the_team() -> None:
    def found(state: TeamState, *ranks: int) -> FirstFailure | None:
        return find_local_failure(state, NodePart(TEAM, ranks, (), "order"), 5.0)

    assert found(TeamState((UP, TOLD), 1), 0, 2) == FirstFailure(2, 5.0)
    assert found(TeamState((MemberState(Phase.LOST), UP)), 4, 5) == FirstFailure(4, 5.0)
    assert found(TeamState((UP, TOLD)), 0, 2) is None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = TeamRecords(tmp_path)
    assert records.namespace() == TeamRecords(tmp_path).namespace()
    written = record(TOLD, UP, DONE, failure=FirstFailure(2, 1.5), is_stopping=True)
    records.write(written)
    assert records.read(TEAM.name) == written
    assert records.all() == ([written], {})
    (tmp_path / "teams" / f"{TEAM.name}.json").write_text("{")
    with pytest.raises(WorldError, match="is damaged"):
        records.read(TEAM.name)
    records.remove(TEAM.name)
    records.remove(TEAM.name)
    assert records.all() == ([], {})


def test_devices_of_a_node() -> None:
    assert [each.kind for each in node_info(raylet({"CPU": 3}), ()).devices] == ["cpu"] * 3
    assert node_info(raylet({"CPU": 2}), ()).devices[0].memory_bytes == 4 << 30
    seen = (DeviceInfo("NVIDIA A40", 48 << 30, {"CUDA_VISIBLE_DEVICES": "GPU-1"}),)
    assert node_info(raylet({"CPU": 8, "GPU": 1}), seen).devices == seen
    told = node_info(raylet({"GPU": 2}, {"ray.io/accelerator-type": "A100", "mimatrix.rack": "r1"}), ())
    assert [(each.kind, dict(each.variables)) for each in told.devices] == [
        ("A100", {"CUDA_VISIBLE_DEVICES": "0"}),
        ("A100", {"CUDA_VISIBLE_DEVICES": "1"}),
    ]
    assert told.rack == "r1"
    played = node_info(raylet({"CPU": 8}, {"mimatrix.kind": "v100", "mimatrix.devices": "2"}), seen)
    assert [each.kind for each in played.devices] == ["v100"] * 2
    assert node_info(raylet({}), ()).devices == ()


def test_nodes_of_one_name_are_told_apart() -> None:
    alike = {"abcdefghij": NODES["a"], "bcdefghijk": NODES["a"], "c": NODES["b"]}
    assert [node.name for node in tell_apart(alike).values()] == ["n0-abcdefgh", "n0-bcdefghi", "n1"]


def test_without_a_token_one_is_made(tmp_path: Path) -> None:
    outside = {"HOME": str(tmp_path / "home")}
    with pytest.raises(UserError, match=r"copy .*ray-token to ~/.ray/auth_token on all machines"):
        ray_environment(tmp_path / "ray", outside)
    file = tmp_path / "ray" / "ray-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    told = ray_environment(tmp_path / "ray", outside)
    assert (told["RAY_AUTH_MODE"], told["RAY_AUTH_TOKEN_PATH"]) == ("token", str(file))


@pytest.mark.parametrize(
    "outside",
    [{"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/x"}, {"RAY_AUTH_MODE": "disabled"}],
)
def test_a_token_or_a_word_from_outside_is_taken(tmp_path: Path, outside: dict[str, str]) -> None:
    told = ray_environment(tmp_path, {"HOME": str(tmp_path), **outside})
    assert told.items() >= outside.items()
    assert told["RAY_AUTH_MODE"] == outside.get("RAY_AUTH_MODE", "token")
    assert not (tmp_path / "ray-token").exists()


def test_a_node_that_hears_nothing_or_is_given_up_ends() -> None:
    for is_known, within_s in ((_never_answers, 0.01), (lambda: False, 60.0)):
        ended = threading.Event()
        Fence(is_known, within_s, ended.set).begin()
        assert ended.wait(10.0)


def _never_answers() -> bool:
    raise ConnectionError


def test_a_failure_in_a_group_ends_no_other() -> None:
    grouped = replace(TEAM, groups=((0, 2), (1,)))
    parts = split(grouped, NODES, OWN, "start-1")
    assert {known: each.team.groups for known, each in parts.items()} == {"b": ((0, 1),), "a": ((0,),)}
    assert find_local_failure(TeamState((FAILED,), 0), parts["a"], NOW_S) is None
    before = replace(first_record(grouped, parts), has_started=True)
    found = judged(before, NodeReports(parts={"a": part(FAILED, first=0), "b": part(UP, UP)}))
    assert (found.members[1], found.failure) == (FAILED, None)
    lost = judged(before, NodeReports(gone={"a": ""}, parts={"b": part(UP, UP)}))
    assert (lost.members[1].phase, lost.failure) == (Phase.LOST, None)
    assert judged(found, NodeReports(parts={"b": part(DONE, DONE)})).state.first_failure == 1
    back = MemberState(Phase.RUNNING, FAILED.cause, 1)
    assert judged(found, NodeReports(parts={"a": part(back), "b": part(UP, UP)})).members == (UP, back, UP)


def test_each_node_starts_its_lost_groups_again() -> None:
    parts = split(replace(TEAM, groups=((0, 2), (1,)), restarts=3), NODES, OWN, "start-1")
    assert [(each.team.restarts, each.team.has_remote_members) for each in parts.values()] == [(3, True), (3, True)]
    whole = split(replace(TEAM, members=(Member("n0", 0), Member("n0", 1))), NODES, OWN, "start-1")
    assert not whole["a"].team.has_remote_members


def test_a_group_on_two_nodes_ends_with_all() -> None:
    parts = split(replace(TEAM, groups=((0, 1), (2,))), NODES, OWN, "start-1")
    assert [each.team.groups for each in parts.values()] == [(), ()]


def test_the_ranks_in_the_causes_of_a_node_are_those_of_the_team() -> None:
    peer = signaled(signal.SIGTERM, EndedFor.PEER, 1)
    grouped = record(has_groups=True)
    found = judged(grouped, NodeReports(parts={"a": part(UP), "b": part(peer, FAILED)}))
    assert found.members == (signaled(signal.SIGTERM, EndedFor.PEER, 2), UP, FAILED)
