"""Which ranks train together: the ranks of one host form a group unless the user says otherwise. No torch here."""

from collections.abc import Sequence

from mimatrix.core.errors import UserError
from mimatrix.core.hosts import ranks_by_host

Groups = tuple[tuple[int, ...], ...]


def group_by_host(hosts: Sequence[str]) -> Groups:
    """Group ranks by host, in the order in which hosts first appear."""
    return tuple(ranks_by_host(hosts).values())


def check_groups(groups: Sequence[Sequence[int]], ranks: int) -> Groups:
    """Return the groups with sorted ranks.

    Raises:
        UserError: A rank is missing, or is in more than one group.
    """
    if not all(isinstance(group, Sequence) and all(type(rank) is int for rank in group) for group in groups):
        raise UserError(f"groups = {groups!r} is not a list of lists of ranks; give one such as [[0, 1], [2]]")
    listed = sorted(rank for group in groups for rank in group)
    if listed != list(range(ranks)) or not all(groups):
        raise UserError(
            f"groups = {[list(group) for group in groups]} does not have each of the ranks 0 to {ranks - 1} once; "
            "give every rank one group"
        )
    return tuple(tuple(sorted(group)) for group in groups)


def locate_rank(groups: Groups, rank: int) -> tuple[int, int]:
    """Return the number of a rank's group, and its rank within the group."""
    return next((number, group.index(rank)) for number, group in enumerate(groups) if rank in group)
