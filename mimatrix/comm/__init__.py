"""Collectives on tensors: windows, synchronisation, executors, the tuner, the c10d backend."""

from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.group import Group
from mimatrix.comm.native import Native
from mimatrix.comm.plans import NATIVE, Plan
from mimatrix.comm.work import Work

__all__ = ["NATIVE", "Endpoint", "Group", "Native", "Plan", "Work"]
