"""A cluster on one machine: network namespaces joined by shaped links, processor quotas, or parts of one GPU."""

from mimatrix.lab.counters import channel_bytes, link_bytes
from mimatrix.lab.gpu import GpuPart, RankOutput, collect_gpu, gpu_environment, mps_daemon, parse_parts, run_gpu
from mimatrix.lab.ip_commands import namespace
from mimatrix.lab.layout import ByAddress, LabLayout, Seat, lay_out
from mimatrix.lab.lifecycle import Removed, down, up
from mimatrix.lab.run import run
from mimatrix.lab.state import Lab, recall

__all__ = [
    "ByAddress",
    "GpuPart",
    "Lab",
    "LabLayout",
    "RankOutput",
    "Removed",
    "Seat",
    "channel_bytes",
    "collect_gpu",
    "down",
    "gpu_environment",
    "lay_out",
    "link_bytes",
    "mps_daemon",
    "namespace",
    "parse_parts",
    "recall",
    "run",
    "run_gpu",
    "up",
]
