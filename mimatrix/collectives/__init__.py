"""Collective algorithms as values that can be verified: which rank reads what from which rank, round by round."""

from mimatrix.collectives.bandwidth_shares import BandwidthShares, shares_by_bandwidth
from mimatrix.collectives.catalog import CATALOG, Algorithm, AlgorithmRequest, build, find
from mimatrix.collectives.compose import relabel
from mimatrix.collectives.fitting import FitOptions, Fitted, fit
from mimatrix.collectives.hdrm import RankMapping, map_ranks
from mimatrix.collectives.rank_order import even_groups, natural_groups, nic_rates, ring_order
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.collectives.verification import verify

__all__ = [
    "CATALOG",
    "Algorithm",
    "AlgorithmRequest",
    "BandwidthShares",
    "Collective",
    "FitOptions",
    "Fitted",
    "Move",
    "RankMapping",
    "Round",
    "Schedule",
    "Shares",
    "build",
    "even_groups",
    "find",
    "fit",
    "map_ranks",
    "natural_groups",
    "nic_rates",
    "relabel",
    "ring_order",
    "shares_by_bandwidth",
    "verify",
]
