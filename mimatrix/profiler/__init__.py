"""Measurements: time and memory of a model against the micro-batch size on this device; links between ranks."""

from mimatrix.profiler.cache import cached_measure
from mimatrix.profiler.cgroups import limiting_cgroup
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
from mimatrix.profiler.links_to_cluster import slow_pair_warnings, to_cluster
from mimatrix.profiler.memory import return_freed_blocks
from mimatrix.profiler.memory_budget import available_bytes, has_memory_limit
from mimatrix.profiler.trial import ProfileTarget

__all__ = [
    "Limits",
    "Links",
    "ProfileTarget",
    "available_bytes",
    "cached_measure",
    "code_fingerprint",
    "device_fingerprint",
    "device_identity",
    "device_name",
    "has_memory_limit",
    "limiting_cgroup",
    "measure_device",
    "measure_links",
    "model_fingerprint",
    "model_size",
    "return_freed_blocks",
    "slow_pair_warnings",
    "to_cluster",
]
