"""How fast devices are relative to one another: as measured in earlier runs of a job, or else by their kind."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from mimatrix.core.device_kinds import match_kind
from mimatrix.core.errors import MiMatrixError
from mimatrix.planner.model.profile import Profile

# Dense half precision in TFLOP/s, rounded, as data sheets have it. No job reaches it; it is good enough for an order.
_BY_KIND = {
    "B200": 2250.0,
    "H200": 990.0,
    "H100": 990.0,
    "L40S": 360.0,
    "A100": 310.0,
    "RTX 5090": 210.0,
    "RTX 4090": 165.0,
    "A40": 150.0,
    "A10": 125.0,
    "V100": 125.0,
    "L4": 120.0,
    "RTX 3090": 71.0,
    "T4": 65.0,
    "RTX 2080 Ti": 54.0,
    "GTX 1080 Ti": 11.0,
    "cpu": 0.5,
}

_MAX_RANKS, _MAX_NAME = 65_536, 200
_MIN_RATE, _MAX_RATE = 1e-9, 1e12
"""Samples per second that a device may have; other figures are not believed."""
_UNUSABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MiMatrixError)


@lru_cache(maxsize=1024)
def speed_of_kind(kind: str) -> float:
    """Return the speed of a kind of device relative to others; an unknown kind counts as a middling GPU."""
    found = [speed for name, speed in _BY_KIND.items() if match_kind(name, (kind,))]
    return max(found, default=100.0)


def speeds_measured(profile: Mapping[str, Any]) -> dict[str, float]:
    """Return the most samples per second of each kind of device, by the curves of an earlier run.

    A worker sent `profile`: what is not understood, or out of bounds, counts for nothing.
    """
    try:
        profiles = [Profile.from_json(each) for each in profile["profiles"][:_MAX_RANKS]]
        return _fastest(
            (each.device, samples / seconds)
            for each in profiles
            for samples, seconds in each.seconds.points
            if seconds > 0
        )
    except _UNUSABLE:
        return {}


def speeds_planned(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the samples per second of each kind of device, by the plan of an earlier run.

    A worker sent `plan`: what is not understood, or out of bounds, counts for nothing.
    """
    try:
        ranks = list(zip(plan["parts"][:_MAX_RANKS], plan["split"][:_MAX_RANKS], strict=True))
        return _fastest(
            (part.get("device") or part["name"], sum(micro) / part["busy_s"])
            for part, micro in ranks
            if part["busy_s"] > 0 and micro
        )
    except _UNUSABLE:
        return {}


def _fastest(rates: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind, rate in rates:
        if isinstance(kind, str) and len(kind) <= _MAX_NAME and _MIN_RATE <= rate <= _MAX_RATE:
            found[kind] = max(rate, found.get(kind, 0.0))
    return found
