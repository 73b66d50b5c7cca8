"""An algorithm fitted to a cluster: placement, order, groups, shares and routes, each with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.routes import Ecmp, Routes
from mimatrix.collectives.bandwidth_shares import shares_by_bandwidth
from mimatrix.collectives.catalog import AlgorithmRequest, admit, build, find
from mimatrix.collectives.hdrm import RankMapping, map_ranks
from mimatrix.collectives.rank_order import natural_groups, nic_rates, ring_order
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UnsuitedError, UserError

Placement = Literal["given", "random", "hdrm"]


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Options beyond the algorithm. A placement of None leaves that choice to the algorithm."""

    ranks: int = 0
    placement: Placement | None = None
    shares: Shares | Literal["equal", "bandwidth"] = "equal"
    segments: int = 1
    order: Literal["cluster", "rank"] = "cluster"
    inside: str = "gdraa"
    between: str = "halving_doubling"
    root: int = 0
    servers: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A schedule, the device of each rank, the routes, and a reason for each choice that was made."""

    schedule: Schedule
    placement: tuple[int, ...]
    routes: Routes
    reasons: tuple[str, ...]


def fit(name: str, fabric: Fabric, collective: Collective, options: FitOptions = FitOptions()) -> Fitted:  # noqa: B008 (a value)
    """Build the algorithm `name` for this cluster, all its devices or the first `options.ranks` of its placement."""
    accepted = find(name).options
    ranks = options.ranks or len(fabric.exits)
    _refuse_misfit(fabric, ranks)
    given = options.shares if isinstance(options.shares, Shares) else None
    admit(name, AlgorithmRequest(collective, ranks, given, options.segments, options.root))
    mapping, reasons = _place(name, fabric, ranks, options)
    segments = options.segments if "segments" in accepted else 1
    reasons += _reasons_to_ignore(name, options)
    order, groups, shares = None, None, None
    if "order" in accepted and options.order == "cluster":
        order = ring_order(fabric, mapping.placement)
        reasons.append("ring order: always on to the nearest rank, so that each node and rack is entered once")
    if "groups" in accepted:
        groups = natural_groups(fabric, mapping.placement)
        reasons.append(f"{len(groups)} groups, {options.inside} inside and {options.between} between them")
    if "shares" in accepted:
        plain = AlgorithmRequest(collective, ranks, segments=segments)
        shares, reason = _shares(name, fabric, mapping.placement, plain, options)
        reasons += reason
    request = AlgorithmRequest(
        collective,
        ranks,
        shares,
        segments,
        options.root,
        order,
        groups,
        options.inside,
        options.between,
        options.servers,
        mapping.core,
    )
    return Fitted(build(name, request), mapping.placement, mapping.routes, tuple(reasons))


def _refuse_misfit(fabric: Fabric, ranks: int) -> None:
    devices = len(fabric.exits)
    if not 2 <= ranks <= devices:
        at_most = f"2 to {devices} ranks" if devices > 1 else "a cluster with two devices or more"
        raise UserError(f"{ranks} ranks do not fit {fabric.cluster.name}, which has {devices} device(s); use {at_most}")


def _place(name: str, fabric: Fabric, ranks: int, options: FitOptions) -> tuple[RankMapping, list[str]]:
    """Place the ranks. HDRM's schedule keeps its core even if it is placed at random, for comparison."""
    chosen = options.placement or ("hdrm" if name == "hdrm" else "given")
    hashed = Ecmp(options.seed)
    mapping = map_ranks(fabric, ranks) if "hdrm" in (chosen, name) else RankMapping((), 0, hashed)
    match chosen:
        case "hdrm":
            return mapping, [
                "placement: HDRM's rank mapping, so that partners have links of their own where there are enough"
            ]
        case "given":
            return RankMapping(tuple(range(ranks)), mapping.core, hashed), []
        case "random":
            shuffled = np.random.default_rng(options.seed % 2**64).permutation(len(fabric.exits))[:ranks]
            placement = tuple(int(device) for device in shuffled)
            return RankMapping(placement, mapping.core, hashed), [f"placement: random, seed {options.seed}"]


def _shares(
    name: str, fabric: Fabric, placement: Sequence[int], request: AlgorithmRequest, options: FitOptions
) -> tuple[Shares | None, list[str]]:
    """Return the shares and the reason for them; None leaves the sizes to the algorithm, which makes them equal."""
    if isinstance(options.shares, Shares):
        return options.shares, []
    if options.shares == "equal":
        return None, []
    if name != "gdraa" or request.collective is not Collective.ALL_REDUCE:
        return None, ["shares: equal, since shares by bandwidth are computed for the all_reduce of gdraa only"]
    rates = nic_rates(fabric, placement)
    if not np.isfinite(rates).all():
        raise UnsuitedError("shares by bandwidth need NICs, and in this cluster nodes forward; use equal")
    by_bandwidth = shares_by_bandwidth([float(rate) for rate in rates], request.segments)
    return by_bandwidth.shares, [f"shares: {by_bandwidth.reason}"]


def _reasons_to_ignore(name: str, options: FitOptions) -> list[str]:
    """Return a reason for each option that is set but that this algorithm does not have."""
    is_set = {
        "segments": options.segments > 1,
        "shares": options.shares != "equal",
        "servers": options.servers > 0,
        "root": options.root > 0,
    }
    return [
        f"ignored: {option}, which {name} does not have"
        for option, value in is_set.items()
        if value and option not in find(name).options
    ]
