"""GDRAA in two levels: every rank owns a block, and each block crosses between two hosts once in each direction.

Reduce: in every host one rank adds up a block's parts of its host; the owner then adds one sum from each other host.
Gather: one rank of every other host reads the block from its owner, and its neighbours from that rank. Hosts may have
any numbers of ranks and blocks any sizes, so it serves uneven shards too. In segments, the memory inside the hosts and
both directions of the network work at the same time.
"""

from collections.abc import Sequence

from mimatrix.collectives.compose import stagger
from mimatrix.collectives.hierarchical import Groups
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UnsuitedError


def two_level(collective: Collective, hosts: Groups, *, shares: Shares | None = None, segments: int = 1) -> Schedule:
    """Build the all-reduce in four rounds, and its halves in two; `hosts` has the ranks of each host.

    Without `shares`, an all-reduce gives every host the same part, since a network carries what hosts own.
    """
    ranks = sum(map(len, hosts))
    if shares is None:
        shares = _by_host(hosts, ranks) if collective is Collective.ALL_REDUCE else Shares.equal(ranks)
    pieces = [_segment(collective, hosts, segment * ranks) for segment in range(segments)]
    owners = tuple(range(ranks)) * segments
    return Schedule("two_level", collective, ranks, owners, shares.for_blocks(owners), tuple(stagger(pieces)))


def _by_host(hosts: Groups, ranks: int) -> Shares:
    weights = [0.0] * ranks
    for members in hosts:
        for rank in members:
            weights[rank] = 1 / len(members)
    return Shares.of(weights)


def _segment(collective: Collective, hosts: Groups, first: int) -> list[Round]:
    reduce, gather = _reduce(hosts, first), _gather(hosts, first)
    match collective:
        case Collective.REDUCE_SCATTER:
            return reduce
        case Collective.ALL_GATHER:
            return gather
        case Collective.ALL_REDUCE:
            return reduce + gather
        case Collective.BROADCAST:
            raise UnsuitedError("two_level has no broadcast; use gdraa or ring")


def _reduce(hosts: Groups, first: int) -> list[Round]:
    inside: list[Move] = []
    between: list[Move] = []
    for owner, block, delegates in _blocks(hosts, first):
        for delegate, members in zip(delegates, hosts, strict=True):
            inside += [Move(rank, delegate, block, adds=True) for rank in _others(members, delegate)]
        between += [Move(delegate, owner, block, adds=True) for delegate in _others(delegates, owner)]
    return [tuple(inside), tuple(between)]


def _gather(hosts: Groups, first: int) -> list[Round]:
    inside: list[Move] = []
    between: list[Move] = []
    for owner, block, delegates in _blocks(hosts, first):
        between += [Move(owner, delegate, block, adds=False) for delegate in _others(delegates, owner)]
        for delegate, members in zip(delegates, hosts, strict=True):
            inside += [Move(delegate, rank, block, adds=False) for rank in _others(members, delegate)]
    return [tuple(between), tuple(inside)]


def _blocks(hosts: Groups, first: int) -> list[tuple[int, range, list[int]]]:
    """Return each block's owner, the block, and its delegate in every host: in the owner's host the owner itself.

    Owners at the same place of their hosts have the same delegates, so that work is spread over the ranks of a host.
    """
    return [
        (owner, range(first + owner, first + owner + 1), [_delegate(host, owner, place) for host in hosts])
        for members in hosts
        for place, owner in enumerate(members)
    ]


def _delegate(host: Sequence[int], owner: int, place: int) -> int:
    return owner if owner in host else host[place % len(host)]


def _others(ranks: Sequence[int], rank: int) -> list[int]:
    """Return the other ranks, from the one after it on, so that not all begin with the same."""
    at = ranks.index(rank)
    return [*ranks[at + 1 :], *ranks[:at]]
