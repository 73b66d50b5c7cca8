"""What moves where: collectives as checkable values."""

from mimatrix.collectives.bandwidth_shares import BandwidthShares, shares_by_bandwidth
from mimatrix.collectives.catalog import CATALOG, Algorithm, Request, build, find
from mimatrix.collectives.compose import relabelled
from mimatrix.collectives.fitting import Fitted, Wishes, fit
from mimatrix.collectives.hdrm import RankMapping, map_ranks
from mimatrix.collectives.rank_order import even_groups, natural_groups, nic_rates, ring_order
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.collectives.verification import verify

__all__ = [
    "CATALOG",
    "Algorithm",
    "BandwidthShares",
    "Collective",
    "Fitted",
    "Move",
    "RankMapping",
    "Request",
    "Round",
    "Schedule",
    "Shares",
    "Wishes",
    "build",
    "even_groups",
    "find",
    "fit",
    "map_ranks",
    "natural_groups",
    "nic_rates",
    "relabelled",
    "ring_order",
    "shares_by_bandwidth",
    "verify",
]
