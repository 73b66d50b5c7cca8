"""A cluster on one machine: network namespaces joined by shaped links, processor quotas, ranks inside."""

from mimatrix.lab.building import Removed, down, up
from mimatrix.lab.counters import channel_bytes, link_bytes
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
    "Groups",
    "Lab",
    "Layout",
    "Removed",
    "Seat",
    "channel_bytes",
    "down",
    "lay_out",
    "link_bytes",
    "memory_groups",
    "namespace",
    "parse_cpus",
    "recall",
    "run",
    "run_together",
    "this_machine",
    "up",
]
