"""How fast devices are beside one another: as a job was seen to run on them, or else by their kind."""

from collections.abc import Mapping
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


@lru_cache(maxsize=1024)
def speed_of_kind(kind: str) -> float:
    """Of a kind of device, beside others; one that is not known is as a middling GPU."""
    found = [speed for name, speed in _BY_KIND.items() if match_kind(name, (kind,))]
    return max(found, default=100.0)


def speeds_measured(profile: Mapping[str, Any]) -> dict[str, float]:
    """The most samples a second of each kind of device, by the curves of an earlier run; nothing where it has none."""
    try:
        profiles = [Profile.from_json(each) for each in profile["profiles"]]
    except (KeyError, TypeError, ValueError, AttributeError, MiMatrixError):
        return {}
    found: dict[str, float] = {}
    for each in profiles:
        rate = max((samples / seconds for samples, seconds in each.seconds.points if seconds > 0), default=0.0)
        found[each.device] = max(rate, found.get(each.device, 0.0))
    return found


def speeds_seen(plan: Mapping[str, Any]) -> dict[str, float]:
    """Samples a second of each kind of device, as the plan of an earlier run has it; nothing where it says nothing."""
    found: dict[str, float] = {}
    try:
        for part, micro in zip(plan["parts"], plan["split"], strict=True):
            if part["busy_s"] > 0 and micro:
                rate = sum(micro) / part["busy_s"]
                found[part["name"]] = max(rate, found.get(part["name"], 0.0))
    except (KeyError, TypeError, ValueError):
        return {}
    return found
