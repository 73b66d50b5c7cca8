"""A team as an order for the keeper of one node, and one sentence with the fix for what nobody can start."""

import math
import re

from mimatrix.core.errors import UserError
from mimatrix.launch.launcher import Member, NodeFacts, Team
from mimatrix.launch.local.store import Order
from mimatrix.launch.local.users import find_account

# A point in front is for folders that are no teams.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def make_order(team: Team, node: NodeFacts) -> Order:
    """What the keeper has to know; refuses what cannot be started on this node."""
    check_name(team.name)
    if not team.words or not team.members:
        raise UserError(f'team "{team.name}" has nothing to start; give it words and at least one member')
    if not (0 <= team.grace_s < math.inf):
        raise UserError(f"a grace of {team.grace_s:g} s cannot be kept; use 0 or more")
    if not team.archive.is_file():
        raise UserError(f"there is no archive {team.archive}; pack the folder to run in as .tar.gz")
    find_account(team.run_as)
    environments = tuple(_environment(team, member, node) for member in team.members)
    archive = str(team.archive.absolute())
    return Order(team.words, environments, archive, team.grace_s, team.run_as, team.groups, team.restarts, team.others)


def check_name(name: str) -> None:
    """Refuse what cannot name a team."""
    if not _NAME.fullmatch(name):
        raise UserError(f'"{name}" cannot name a team; use letters, digits, "_", "-" and, not in front, "."')


def _environment(team: Team, member: Member, node: NodeFacts) -> dict[str, str]:
    if member.node != node.name:
        raise UserError(f'there is no node "{member.node}" here; this launcher has "{node.name}" alone')
    if not 0 <= member.device < len(node.devices):
        raise UserError(f"{node.name} has no device {member.device}; use 0 to {len(node.devices) - 1}")
    return {**team.environment, **node.devices[member.device].variables, **member.environment}
