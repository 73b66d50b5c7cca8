"""Measurements: time and memory of a model against the batch, on this device; links between ranks."""

from mimatrix.profiler.cache import cached_measure
from mimatrix.profiler.cgroups import limiting_group
from mimatrix.profiler.device import Limits, measure_device
from mimatrix.profiler.fingerprints import (
    code_fingerprint,
    device_fingerprint,
    device_identity,
    device_name,
    model_fingerprint,
    model_size,
)
from mimatrix.profiler.links import Links, measure_links
from mimatrix.profiler.links_to_cluster import remarks, to_cluster
from mimatrix.profiler.memory import give_back_at_once
from mimatrix.profiler.memory_budget import is_limited, room
from mimatrix.profiler.trial import ProfileTarget

__all__ = [
    "Limits",
    "Links",
    "ProfileTarget",
    "cached_measure",
    "code_fingerprint",
    "device_fingerprint",
    "device_identity",
    "device_name",
    "give_back_at_once",
    "is_limited",
    "limiting_group",
    "measure_device",
    "measure_links",
    "model_fingerprint",
    "model_size",
    "remarks",
    "room",
    "to_cluster",
]
