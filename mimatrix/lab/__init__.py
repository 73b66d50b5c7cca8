"""A cluster on one machine: network namespaces joined by shaped links, processor quotas, or parts of one GPU."""

from mimatrix.lab.building import Removed, down, up
from mimatrix.lab.counters import channel_bytes, link_bytes
from mimatrix.lab.gpu import GpuPart, RankOutput, collect_gpu, gpu_environment, mps_daemon, parse_parts, run_gpu
from mimatrix.lab.layout import ByAddress, Layout, Seat, lay_out
from mimatrix.lab.orders import namespace
from mimatrix.lab.processes import ENDS, TIMED_OUT, Command, Ending, run_together
from mimatrix.lab.quota import LEAST_CPUS, CpuGroups, Groups, memory_groups, parse_cpus, this_machine
from mimatrix.lab.ranks import run
from mimatrix.lab.state import Lab, recall

__all__ = [
    "ENDS",
    "LEAST_CPUS",
    "TIMED_OUT",
    "ByAddress",
    "Command",
    "CpuGroups",
    "Ending",
    "GpuPart",
    "Groups",
    "Lab",
    "Layout",
    "RankOutput",
    "Removed",
    "Seat",
    "channel_bytes",
    "collect_gpu",
    "down",
    "gpu_environment",
    "lay_out",
    "link_bytes",
    "memory_groups",
    "mps_daemon",
    "namespace",
    "parse_cpus",
    "parse_parts",
    "recall",
    "run",
    "run_gpu",
    "run_together",
    "this_machine",
    "up",
]
