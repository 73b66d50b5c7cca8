"""What is stored and sent has a version; what another version wrote harms its own team only."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.launcher_contract import Ground

from mimatrix.core.errors import UserError, WorldError
from mimatrix.launch import LocalLauncher, Member, MemberState, Phase, Team, cores
from mimatrix.launch.local.launch_spec import build_spec
from mimatrix.launch.local.store import TeamFolder
from mimatrix.launch.ray.messages import decode_part as decode_node_part
from mimatrix.launch.ray.messages import decode_reply, decode_request, encode_error, encode_part, encode_request
from mimatrix.launch.ray.split import MemberLocation, NodePart, TeamRecord
from mimatrix.launch.ray.store import TeamRecords
from mimatrix.launch.start_failure import StartError
from mimatrix.launch.team_json import FormatVersionError


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(lambda: LocalLauncher(tmp_path / "place", "here", cores(1)), tmp_path)
    yield ground
    ground.clear()


def change_version(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))


@pytest.mark.wording
def test_state_of_another_version_harms_its_own_team_only(ground: Ground) -> None:
    other, mine = ground.start("", name="other"), ground.start("print('up')", name="mine")
    ground.ended(other)
    ground.ended(mine)
    state = ground.folder / "place" / "teams" / other / "state.json"
    before = state.read_text()
    change_version(state)
    found = ground.launcher.states()
    assert found[mine].members[0].code == 0
    assert "has format 99" in found[other].unreadable
    assert not found[other].has_ended, "it may run"
    for call in (ground.launcher.end, ground.launcher.forget, lambda name: ground.start("", name=name)):
        with pytest.raises(WorldError, match="use the version that wrote it"):
            call(other)
    state.write_text(before)


def test_launch_spec_survives_the_disk_and_another_version_is_refused(ground: Ground, tmp_path: Path) -> None:
    more = {"groups": ((0,),), "restarts": 3, "restart_after": "/x", "has_remote_members": True}
    spec = build_spec(replace(ground.team("x"), **more), ground.launcher.nodes()[0])  # type: ignore[arg-type]
    folder = TeamFolder(tmp_path)
    folder.write_spec(spec)
    assert folder.read_spec() == spec
    change_version(tmp_path / "order.json")
    with pytest.raises(FormatVersionError, match="has format 99, and this version of MiMatrix reads 1"):
        folder.read_spec()


@pytest.mark.wording
def test_ray_record_that_cannot_be_read_harms_its_own_team_only(tmp_path: Path) -> None:
    records = TeamRecords(tmp_path)
    records.namespace()
    record = TeamRecord("a", "s", (MemberLocation("n", "id"),), (MemberState(Phase.RUNNING),))
    for name in ("a", "b", "c"):
        records.write(replace(record, name=name))
    change_version(tmp_path / "teams" / "b.json")
    (tmp_path / "teams" / "c.json").write_text("[" * 5000)
    known, unreadable = records.all()
    assert known == [record]
    assert set(unreadable) == {"b", "c"}
    assert "has format 99" in unreadable["b"]


def test_messages_to_nodes_are_plain_data() -> None:
    members = (Member("n", 0, {"RANK": "0"}), Member("n", 1))
    team = Team(name="a", command=("x",), members=members, archive=Path("a.tar.gz"), groups=((0,), (1,)))
    part = NodePart(team, (3, 4), ("peer",), "start")
    method, arguments = decode_request(encode_request("start", {"part": encode_part(part)}))
    assert (method, decode_node_part(arguments["part"])) == ("start", part)


def test_message_of_another_protocol_is_refused_with_a_sentence() -> None:
    text = encode_request("states", {"teams": []}).replace('"protocol": 1', '"protocol": 2')
    with pytest.raises(WorldError, match=r"different protocols \(1 and 2\); install the same version"):
        decode_request(text)
    for wrong in (text, "", "{", "[]", "null", "7"):
        assert isinstance(decode_reply(wrong), WorldError)


def test_errors_of_nodes_keep_what_may_help() -> None:
    short = decode_reply(encode_error(StartError("no memory", is_transient=True)))
    assert isinstance(short, StartError)
    assert short.is_transient
    assert isinstance(decode_reply(encode_error(UserError("no such node"))), UserError)
