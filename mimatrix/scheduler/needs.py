"""What a job needs in a cluster: counts of devices, by the kinds that are there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mimatrix.core.device_kinds import match_kind
from mimatrix.core.resources import ANY, ResourceRequest


@dataclass(frozen=True, slots=True)
class Need:
    """From `least` to `most` devices of any of these kinds."""

    kinds: tuple[str, ...]
    least: int
    most: int


Needs = tuple[Need, ...]
Counts = tuple[tuple[str, int], ...]
"""Devices by kind, sorted, without zeros."""


def counts_of(devices: Mapping[str, int] | Iterable[tuple[str, int]]) -> Counts:
    """Return counts in the form in which reasons carry them."""
    return tuple(sorted((kind, count) for kind, count in dict(devices).items() if count))


@lru_cache(maxsize=16_384)
def needs_of(request: ResourceRequest, kinds: tuple[str, ...], devices: int) -> Needs:
    """Return what a request means in a cluster of these kinds.

    Parts that name a kind come first: a part that takes any kind takes what is left.
    """
    found = (
        Need(kinds if part.kind == ANY else tuple(match_kind(part.kind, kinds)), part.least, part.most)
        for part in request.within(devices).parts
    )
    return tuple(sorted(found, key=lambda need: len(need.kinds)))
