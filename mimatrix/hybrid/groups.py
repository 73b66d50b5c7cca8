"""Who is with whom: ranks of one host make a group, unless the user says otherwise. No torch here."""

from collections.abc import Sequence

from mimatrix.core.errors import UserError

Groups = tuple[tuple[int, ...], ...]


def group_by_host(hosts: Sequence[str]) -> Groups:
    """The ranks of each host, in the order in which hosts come first."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(map(tuple, found.values()))


def check_groups(groups: Sequence[Sequence[int]], ranks: int) -> Groups:
    """As given, with every rank in one group."""
    if not all(isinstance(group, Sequence) and all(type(rank) is int for rank in group) for group in groups):
        raise UserError(f"groups = {groups!r} is no list of lists of ranks; give one such as [[0, 1], [2]]")
    given = sorted(rank for group in groups for rank in group)
    if given != list(range(ranks)) or not all(groups):
        raise UserError(
            f"groups = {[list(group) for group in groups]} does not have each of the ranks 0 to {ranks - 1} once; "
            "give every rank one group"
        )
    return tuple(tuple(sorted(group)) for group in groups)


def locate_rank(groups: Groups, rank: int) -> tuple[int, int]:
    """The group of a rank, and its number there."""
    return next((number, group.index(rank)) for number, group in enumerate(groups) if rank in group)
