"""Teams and their states as plain JSON data, for files and for messages. What holds them has the version number."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimatrix.core.errors import WorldError
from mimatrix.launch.devices import DeviceInfo, NodeInfo
from mimatrix.launch.exit_causes import ExitCause
from mimatrix.launch.launcher import Member, MemberState, Phase, Team, TeamState
from mimatrix.launch.start_failure import StartFailure

DECODE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What decoding raises for data that were not written by the function next to it."""


class FormatVersionError(WorldError):
    """A file was written by another version of MiMatrix."""


def check_version(data: Any, known: int, path: Path) -> None:
    """Raise a `FormatVersionError` unless `data` has the version that this program reads.

    Raises:
        ValueError: `data` has no version at all.
    """
    version = data["version"]
    if version != known:
        raise FormatVersionError(
            f"{path} has format {version!r}, and this version of MiMatrix reads {known}; use the version that wrote it"
        )


def encode_member_state(state: MemberState) -> dict[str, Any]:
    """Return a member's state as plain data."""
    cause = state.cause.to_json() if state.cause else None
    return {"phase": state.phase.value, "cause": cause, "restarts": state.restarts}


def decode_member_state(data: Mapping[str, Any]) -> MemberState:
    """Return the state that `encode_member_state` wrote."""
    cause = None if data["cause"] is None else ExitCause.from_json(data["cause"])
    return MemberState(Phase(data["phase"]), cause, int(data["restarts"]))


def encode_team_state(state: TeamState) -> dict[str, Any]:
    """Return a team's state as plain data."""
    return {
        "members": [encode_member_state(member) for member in state.members],
        "first_failure": state.first_failure,
        "is_restarting": state.is_restarting,
        "unreadable": state.unreadable,
        "start_failure": state.start_failure.to_json() if state.start_failure else None,
    }


def decode_team_state(data: Mapping[str, Any]) -> TeamState:
    """Return the state that `encode_team_state` wrote."""
    return TeamState(
        tuple(map(decode_member_state, data["members"])),
        decode_optional_int(data["first_failure"]),
        is_restarting=bool(data["is_restarting"]),
        unreadable=str(data["unreadable"]),
        start_failure=None if data["start_failure"] is None else StartFailure.from_json(data["start_failure"]),
    )


def encode_team(team: Team) -> dict[str, Any]:
    """Return a team as plain data, with the name of its archive instead of the path."""
    return {
        "name": team.name,
        "command": list(team.command),
        "members": [
            {"node": member.node, "device": member.device, "environment": dict(member.environment)}
            for member in team.members
        ],
        "archive": team.archive.name,
        "environment": dict(team.environment),
        "grace_s": team.grace_s,
        "run_as": team.run_as,
        "groups": [list(group) for group in team.groups],
        "restarts": team.restarts,
        "restart_after": team.restart_after,
        "has_remote_members": team.has_remote_members,
    }


def decode_team(data: Mapping[str, Any]) -> Team:
    """Return the team that `encode_team` wrote."""
    return Team(
        name=str(data["name"]),
        command=decode_strings(data["command"]),
        members=tuple(
            Member(str(member["node"]), int(member["device"]), decode_variables(member["environment"]))
            for member in data["members"]
        ),
        archive=Path(str(data["archive"])),
        environment=decode_variables(data["environment"]),
        grace_s=float(data["grace_s"]),
        run_as=str(data["run_as"]),
        groups=decode_groups(data["groups"]),
        restarts=int(data["restarts"]),
        restart_after=str(data["restart_after"]),
        has_remote_members=bool(data["has_remote_members"]),
    )


def encode_node(node: NodeInfo) -> dict[str, Any]:
    """Return a node as plain data."""
    devices = [
        {"kind": device.kind, "memory_bytes": device.memory_bytes, "variables": dict(device.variables)}
        for device in node.devices
    ]
    return {"name": node.name, "address": node.address, "rack": node.rack, "devices": devices}


def decode_node(data: Mapping[str, Any]) -> NodeInfo:
    """Return the node that `encode_node` wrote."""
    devices = tuple(
        DeviceInfo(str(device["kind"]), int(device["memory_bytes"]), decode_variables(device["variables"]))
        for device in data["devices"]
    )
    return NodeInfo(str(data["name"]), str(data["address"]), devices, str(data["rack"]))


def decode_strings(data: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple."""
    return tuple(map(str, data))


def decode_variables(data: Mapping[str, Any]) -> dict[str, str]:
    """Return an object of strings."""
    return {str(name): str(value) for name, value in data.items()}


def decode_groups(data: Any) -> tuple[tuple[int, ...], ...]:
    """Return a list of lists of ranks as tuples."""
    return tuple(tuple(map(int, group)) for group in data)


def decode_optional_int(data: Any) -> int | None:
    """Return a number, or None."""
    return None if data is None else int(data)
