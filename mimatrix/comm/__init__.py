"""Collectives on tensors: windows, synchronisation, executors, the tuner, the c10d backend."""

from mimatrix.comm.c10d import Native
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.group import Group
from mimatrix.comm.tuning.choice import NATIVE, Plan
from mimatrix.comm.work import Work

__all__ = ["NATIVE", "Endpoint", "Group", "Native", "Plan", "Work"]
