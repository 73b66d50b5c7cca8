"""Collectives on tensors: windows, synchronisation, executors, the tuner, the c10d backend."""

from mimatrix.comm.c10d import C10dBackend
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.group import Group
from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice
from mimatrix.comm.work import Work

__all__ = ["C10D", "AlgorithmChoice", "C10dBackend", "Endpoint", "Group", "Work"]
