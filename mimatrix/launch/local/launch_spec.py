"""A team as its supervisor on one node has to know it, and one sentence with the fix for what cannot be started."""

import math
import re

from mimatrix.core.errors import UserError
from mimatrix.launch.devices import NodeInfo
from mimatrix.launch.launcher import Member, Team
from mimatrix.launch.local.store import LaunchSpec
from mimatrix.launch.local.users import find_account

# Names that begin with a point are for directories that are not teams.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def build_spec(team: Team, node: NodeInfo) -> LaunchSpec:
    """Return what the supervisor has to know; raise a `UserError` for what cannot be started on this node."""
    validate(team, node)
    return LaunchSpec(
        command=team.command,
        environments=tuple(_environment(team, member, node) for member in team.members),
        archive=str(team.archive.absolute()),
        grace_s=team.grace_s,
        run_as=team.run_as,
        groups=team.groups,
        restarts=team.restarts,
        restart_after=team.restart_after,
        has_remote_members=team.has_remote_members,
    )


def validate(team: Team, node: NodeInfo | None) -> None:
    """Raise a `UserError` for a team that cannot be started; without a node, check only what holds on all nodes."""
    validate_name(team.name)
    if not team.command or not team.members:
        raise UserError(f'team "{team.name}" has nothing to start; give it a command and at least one member')
    if not (0 <= team.grace_s < math.inf):
        raise UserError(f"a grace period of {team.grace_s:g} s cannot be kept; use 0 or more")
    if not team.archive.is_file():
        raise UserError(f"there is no archive {team.archive}; pack the directory to run in as .tar.gz")
    if node:
        find_account(team.run_as)
        for member in team.members:
            _validate_member(member, node)


def validate_name(name: str) -> None:
    """Raise a `UserError` for what cannot be the name of a team."""
    if not _NAME.fullmatch(name):
        raise UserError(f'"{name}" cannot name a team; use letters, digits, "_", "-" and, not in front, "."')


def _validate_member(member: Member, node: NodeInfo) -> None:
    if member.node != node.name:
        raise UserError(f'unknown node "{member.node}"; this launcher has only "{node.name}"')
    if not 0 <= member.device < len(node.devices):
        raise UserError(f"{node.name} has no device {member.device}; use 0 to {len(node.devices) - 1}")


def _environment(team: Team, member: Member, node: NodeInfo) -> dict[str, str]:
    return {**team.environment, **node.devices[member.device].variables, **member.environment}
