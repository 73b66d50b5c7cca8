"""Collectives on tensors: windows, synchronisation, executors, the tuner, the c10d backend."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimatrix.comm.c10d import C10dBackend
    from mimatrix.comm.endpoint import Endpoint
    from mimatrix.comm.group import Group
    from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice
    from mimatrix.comm.work import Work

__all__ = ["C10D", "AlgorithmChoice", "C10dBackend", "Endpoint", "Group", "Work"]

# `import torch` imports this package to register the backend: everything else is imported with its first use.
_LAZY = {
    "AlgorithmChoice": "mimatrix.comm.tuning.choice",
    "C10D": "mimatrix.comm.tuning.choice",
    "C10dBackend": "mimatrix.comm.c10d",
    "Endpoint": "mimatrix.comm.endpoint",
    "Group": "mimatrix.comm.group",
    "Work": "mimatrix.comm.work",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mimatrix.comm' has no attribute {name!r}")
