"""An algorithm fitted to a cluster: who runs where, in what order and groups, with what shares and routes; and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.routes import Ecmp, Routes
from mimatrix.collectives.bandwidth_shares import shares_by_bandwidth
from mimatrix.collectives.catalog import Request, admit, build, find
from mimatrix.collectives.hdrm import RankMapping, map_ranks
from mimatrix.collectives.rank_order import natural_groups, nic_rates, ring_order
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UnsuitedError, UserError

Placement = Literal["given", "random", "hdrm"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What may be asked for beyond the algorithm. A placement of None leaves that choice to the algorithm."""

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


def fit(name: str, fabric: Fabric, collective: Collective, wishes: Wishes = Wishes()) -> Fitted:  # noqa: B008 (a value)
    """Build the algorithm `name` for this cluster, all its devices or the first `wishes.ranks` of its placement."""
    options = find(name).options
    ranks = wishes.ranks or len(fabric.exits)
    _refuse_misfit(fabric, ranks)
    given = wishes.shares if isinstance(wishes.shares, Shares) else None
    admit(name, Request(collective, ranks, given, wishes.segments, wishes.root))
    mapping, reasons = _place(name, fabric, ranks, wishes)
    segments = wishes.segments if "segments" in options else 1
    reasons += _ignored(name, wishes)
    order, groups, shares = None, None, None
    if "order" in options and wishes.order == "cluster":
        order = ring_order(fabric, mapping.placement)
        reasons.append("ring order: always on to the nearest rank, so that each node and rack is entered once")
    if "groups" in options:
        groups = natural_groups(fabric, mapping.placement)
        reasons.append(f"{len(groups)} groups, {wishes.inside} inside and {wishes.between} between them")
    if "shares" in options:
        plain = Request(collective, ranks, segments=segments)
        shares, reason = _shares(name, fabric, mapping.placement, plain, wishes)
        reasons += reason
    request = Request(
        collective,
        ranks,
        shares,
        segments,
        wishes.root,
        order,
        groups,
        wishes.inside,
        wishes.between,
        wishes.servers,
        mapping.core,
    )
    return Fitted(build(name, request), mapping.placement, mapping.routes, tuple(reasons))


def _refuse_misfit(fabric: Fabric, ranks: int) -> None:
    devices = len(fabric.exits)
    if not 2 <= ranks <= devices:
        at_most = f"2 to {devices} ranks" if devices > 1 else "a cluster with two devices or more"
        raise UserError(f"{ranks} ranks do not fit {fabric.cluster.name}, which has {devices} device(s); use {at_most}")


def _place(name: str, fabric: Fabric, ranks: int, wishes: Wishes) -> tuple[RankMapping, list[str]]:
    """Where the ranks run. HDRM's schedule keeps its core even where it is placed at random, for comparison."""
    wanted = wishes.placement or ("hdrm" if name == "hdrm" else "given")
    hashed = Ecmp(wishes.seed)
    mapping = map_ranks(fabric, ranks) if "hdrm" in (wanted, name) else RankMapping((), 0, hashed)
    match wanted:
        case "hdrm":
            return mapping, [
                "placement: HDRM's rank mapping, so that partners have links of their own where there are enough"
            ]
        case "given":
            return RankMapping(tuple(range(ranks)), mapping.core, hashed), []
        case "random":
            shuffled = np.random.default_rng(wishes.seed % 2**64).permutation(len(fabric.exits))[:ranks]
            placement = tuple(int(device) for device in shuffled)
            return RankMapping(placement, mapping.core, hashed), [f"placement: random, seed {wishes.seed}"]


def _shares(
    name: str, fabric: Fabric, placement: Sequence[int], request: Request, wishes: Wishes
) -> tuple[Shares | None, list[str]]:
    """None leaves the sizes to the algorithm, which makes them equal."""
    if isinstance(wishes.shares, Shares):
        return wishes.shares, []
    if wishes.shares == "equal":
        return None, []
    if name != "gdraa" or request.collective is not Collective.ALL_REDUCE:
        return None, ["shares: equal, since shares by bandwidth are computed for the all_reduce of gdraa only"]
    rates = nic_rates(fabric, placement)
    if not np.isfinite(rates).all():
        raise UnsuitedError("shares by bandwidth need NICs, and in this cluster nodes forward; use equal")
    found = shares_by_bandwidth([float(rate) for rate in rates], request.segments)
    return found.shares, [f"shares: {found.reason}"]


def _ignored(name: str, wishes: Wishes) -> list[str]:
    """What was asked for and means nothing to this algorithm: said, not swallowed."""
    asked = {
        "segments": wishes.segments > 1,
        "shares": wishes.shares != "equal",
        "servers": wishes.servers > 0,
        "root": wishes.root > 0,
    }
    return [
        f"ignored: {option}, which {name} does not have"
        for option, is_set in asked.items()
        if is_set and option not in find(name).options
    ]
