"""Every algorithm by name: its collectives, its requirements, how it is built, what it costs.

A new algorithm is one file and one entry here. The closed forms are for the all-reduce with the defaults, by number of
ranks: `rounds`; `sends`, the part of the message that the busiest rank sends (an upper bound for trees); `roundings`,
how often an element is rounded on its way. Algorithms on groups have none, because the groups decide. The tests compare
the forms with the schedules themselves. `moves` bounds the size of a schedule before it is built.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mimatrix.collectives.binomial import binomial
from mimatrix.collectives.double_tree import double_tree
from mimatrix.collectives.gdraa import gdraa
from mimatrix.collectives.halving_doubling import halving_doubling, largest_power_of_two
from mimatrix.collectives.hierarchical import Groups, hierarchical
from mimatrix.collectives.parameter_server import parameter_server
from mimatrix.collectives.rank_order import even_groups
from mimatrix.collectives.ring import ring
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.collectives.two_level import two_level
from mimatrix.core.errors import UnsuitedError, UserError, nearest

MOST_MOVES = 10_000_000
"""A schedule is a list of moves in memory; beyond this it would take minutes to build and gigabytes to hold."""


@dataclass(frozen=True, slots=True)
class AlgorithmRequest:
    """The parameters of a schedule. Each algorithm takes those that its entry in the catalog lists as options."""

    collective: Collective
    ranks: int
    shares: Shares | None = None
    segments: int = 1
    root: int = 0
    order: tuple[int, ...] | None = None
    groups: Groups | None = None
    inside: str = "gdraa"
    between: str = "halving_doubling"
    servers: int = 0
    core: int = 0
    fold: bool = True


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An entry of the catalog."""

    name: str
    collectives: tuple[Collective, ...]
    options: tuple[str, ...]
    requires: str
    build: Callable[[AlgorithmRequest], Schedule]
    moves: Callable[[AlgorithmRequest], int]
    rounds: Callable[[int], int] | None = None
    sends: Callable[[int], float] | None = None
    roundings: Callable[[int], int] | None = None


def build(name: str, request: AlgorithmRequest) -> Schedule:
    """Build the schedule of the algorithm `name`."""
    admit(name, request)
    return find(name).build(request)


def admit(name: str, request: AlgorithmRequest) -> None:
    """Raise an error for a request that can be refused before a schedule is built."""
    algorithm = find(name)
    if request.ranks < 2:
        raise UserError(f"a collective needs two ranks or more, got {request.ranks}; use a larger cluster")
    if request.collective not in algorithm.collectives:
        able = [other.name for other in CATALOG.values() if request.collective in other.collectives]
        raise UnsuitedError(f"{name} has no {request.collective}; use {' or '.join(able)}")
    if request.shares and len(request.shares) != request.ranks:
        raise UserError(f"got {len(request.shares)} shares for {request.ranks} ranks; give one for each rank")
    if request.segments < 1:
        raise UserError(f"got {request.segments} segments; use 1 or more")
    if not 0 <= request.root < request.ranks:
        raise UserError(f"the root is rank {request.root} of {request.ranks}; use 0 to {request.ranks - 1}")
    if (moves := algorithm.moves(request)) > MOST_MOVES:
        raise UnsuitedError(
            f"{name} for {request.ranks} ranks in {request.segments} segment(s) has up to {moves:,} moves, more than "
            f"the {MOST_MOVES:,} that a schedule may have; use fewer ranks or segments, or halving_doubling"
        )


def find(name: str) -> Algorithm:
    """Return the catalog's entry of that name."""
    if name not in CATALOG:
        raise UserError(f'unknown algorithm "{name}"{nearest(name, CATALOG)}')
    return CATALOG[name]


def _hierarchical(request: AlgorithmRequest) -> Schedule:
    def part(name: str) -> Callable[[Collective, int], Schedule]:
        if name in ("hierarchical", "hdrm"):
            raise UserError(f"{name} cannot be a part of hierarchical; use gdraa, ring or halving_doubling")
        return lambda collective, ranks: _part(name, collective, ranks)

    groups = _groups(request)
    return hierarchical(
        request.collective,
        groups,
        part(request.inside),
        part(request.between),
        segments=request.segments,
        shares=request.shares,
    )


def _part(name: str, collective: Collective, ranks: int) -> Schedule:
    if collective not in find(name).collectives:
        raise UserError(f"{name} has no {collective}, which a part of hierarchical needs; use gdraa or ring")
    return build(name, AlgorithmRequest(collective, ranks))


def _hdrm(request: AlgorithmRequest) -> Schedule:
    core = request.core or largest_power_of_two(request.ranks)
    schedule = halving_doubling(request.collective, request.ranks, shares=request.shares, fold=request.fold, core=core)
    return replace(schedule, algorithm="hdrm")


def _direct_moves(request: AlgorithmRequest) -> int:
    return 2 * request.ranks * (request.ranks - 1) * request.segments


def _ring_moves(request: AlgorithmRequest) -> int:
    chain = request.collective is Collective.BROADCAST
    return request.ranks * request.segments if chain else _direct_moves(request)


def _halving_moves(request: AlgorithmRequest) -> int:
    return 2 * request.ranks * (_halvings(request.ranks) + 2)


def _hierarchical_moves(request: AlgorithmRequest) -> int:
    groups = _groups(request)
    widest = max(map(len, groups)) + len(groups)
    return 2 * request.segments * request.ranks * (widest + 2)


def _two_level_moves(request: AlgorithmRequest) -> int:
    return 2 * request.segments * request.ranks * (request.ranks + len(_groups(request)))


def _groups(request: AlgorithmRequest) -> Groups:
    return request.groups or even_groups(request.ranks)


def _servers(request: AlgorithmRequest) -> int:
    return request.servers or max(2, request.ranks // 4)


def _halvings(ranks: int) -> int:
    return largest_power_of_two(ranks).bit_length() - 1


def _folds(ranks: int) -> int:
    return int(ranks != largest_power_of_two(ranks))


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


_ALL_REDUCE = (Collective.ALL_REDUCE,)
_HALVES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
_EVERYTHING = (*_HALVES, Collective.BROADCAST)

CATALOG: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "gdraa",
            _EVERYTHING,
            ("shares", "segments", "root"),
            "nothing",
            lambda r: gdraa(r.collective, r.ranks, shares=r.shares, segments=r.segments, root=r.root),
            moves=_direct_moves,
            rounds=lambda _: 2,
            sends=lambda ranks: 2 * (ranks - 1) / ranks,
            roundings=lambda _: 1,
        ),
        Algorithm(
            "ring",
            _EVERYTHING,
            ("shares", "segments", "order", "root"),
            "nothing",
            lambda r: ring(r.collective, r.ranks, shares=r.shares, segments=r.segments, order=r.order, root=r.root),
            moves=_ring_moves,
            rounds=lambda ranks: 2 * (ranks - 1),
            sends=lambda ranks: 2 * (ranks - 1) / ranks,
            roundings=lambda ranks: ranks - 1,
        ),
        Algorithm(
            "halving_doubling",
            _HALVES,
            ("shares", "fold"),
            "a power of two of ranks, or fold",
            lambda r: halving_doubling(r.collective, r.ranks, shares=r.shares, fold=r.fold),
            moves=_halving_moves,
            rounds=lambda ranks: 2 * _halvings(ranks) + 2 * _folds(ranks),
            sends=lambda ranks: 2 * (1 - 1 / largest_power_of_two(ranks)) + _folds(ranks),
            roundings=lambda ranks: _halvings(ranks) + _folds(ranks),
        ),
        Algorithm(
            "hdrm",
            _HALVES,
            ("shares", "fold", "core"),
            "a BiGraph or a leaf-spine network",
            _hdrm,
            moves=_halving_moves,
            rounds=lambda ranks: 2 * _halvings(ranks) + 2 * _folds(ranks),
            sends=lambda ranks: 2 * (1 - 1 / largest_power_of_two(ranks)) + _folds(ranks),
            roundings=lambda ranks: _halvings(ranks) + _folds(ranks),
        ),
        Algorithm(
            "hierarchical",
            _HALVES,
            ("shares", "segments", "groups", "inside", "between"),
            "groups of ranks (nodes or racks, where the cluster has them)",
            _hierarchical,
            moves=_hierarchical_moves,
        ),
        Algorithm(
            "two_level",
            _HALVES,
            ("shares", "segments", "groups"),
            "groups of ranks (nodes or racks, where the cluster has them)",
            lambda r: two_level(r.collective, _groups(r), shares=r.shares, segments=r.segments),
            moves=_two_level_moves,
        ),
        Algorithm(
            "binomial",
            (Collective.ALL_REDUCE, Collective.BROADCAST),
            ("segments", "root"),
            "nothing",
            lambda r: binomial(r.collective, r.ranks, segments=r.segments, root=r.root),
            moves=lambda r: 2 * r.ranks * r.segments,
            rounds=lambda ranks: 2 * _levels(ranks),
            sends=_levels,
            roundings=_levels,
        ),
        Algorithm(
            "double_tree",
            _ALL_REDUCE,
            ("segments",),
            "nothing",
            lambda r: double_tree(r.collective, r.ranks, segments=r.segments),
            moves=lambda r: 4 * r.ranks * r.segments,
            rounds=lambda ranks: 2 * _halvings(ranks),
            sends=lambda _: 2.0,
            roundings=_halvings,
        ),
        Algorithm(
            "parameter_server",
            _ALL_REDUCE,
            (),
            "nothing",
            lambda r: parameter_server(r.collective, r.ranks),
            moves=lambda r: 2 * r.ranks,
            rounds=lambda _: 2,
            sends=lambda ranks: ranks - 1,
            roundings=lambda _: 1,
        ),
        Algorithm(
            "sharded_parameter_server",
            _ALL_REDUCE,
            ("shares", "servers"),
            "two ranks or more that serve",
            lambda r: parameter_server(r.collective, r.ranks, servers=_servers(r), shares=r.shares),
            moves=lambda r: 2 * r.ranks * _servers(r),
            rounds=lambda _: 2,
            sends=lambda ranks: (ranks - 2) / max(2, ranks // 4) + 1,
            roundings=lambda _: 1,
        ),
    )
}
