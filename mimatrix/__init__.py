"""MiMatrix: train PyTorch models on clusters whose machines are not alike.

Start with `init`, which returns a `Run`; see `help(mimatrix.init)` and `help(mimatrix.Run)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mimatrix.core.errors import (
    ConfigError,
    DifferentCalls,
    MiMatrixError,
    MismatchError,
    PeerLost,
    SaveError,
    ScheduleError,
    UnsuitedError,
    UserError,
    WorldError,
)

if TYPE_CHECKING:
    from mimatrix._init import init
    from mimatrix.engine.loop.loader import MicroBatchLoader
    from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
    from mimatrix.engine.loop.preemption import Preempted
    from mimatrix.engine.loop.prepared_optimizer import PreparedOptimizer
    from mimatrix.engine.run import Run
    from mimatrix.engine.run_status import RunStatus
    from mimatrix.engine.step_timer import StepStats
    from mimatrix.engine.weight_average import WeightAverage
    from mimatrix.hybrid.mode import Hybrid
    from mimatrix.planner.model.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DifferentCalls",
    "Hybrid",
    "MiMatrixError",
    "MicroBatchLoader",
    "MismatchError",
    "PeerLost",
    "Plan",
    "Preempted",
    "PreparedOptimizer",
    "Run",
    "RunStatus",
    "SaveError",
    "ScheduleError",
    "StepStats",
    "SyncedLRScheduler",
    "UnsuitedError",
    "UserError",
    "WeightAverage",
    "WorldError",
    "__version__",
    "init",
]

# The command and the server start without torch: these are imported with their first use.
_LAZY = {
    "Hybrid": "mimatrix.hybrid.mode",
    "MicroBatchLoader": "mimatrix.engine.loop.loader",
    "Plan": "mimatrix.planner.model.plan",
    "Preempted": "mimatrix.engine.loop.preemption",
    "PreparedOptimizer": "mimatrix.engine.loop.prepared_optimizer",
    "Run": "mimatrix.engine.run",
    "RunStatus": "mimatrix.engine.run_status",
    "StepStats": "mimatrix.engine.step_timer",
    "SyncedLRScheduler": "mimatrix.engine.loop.lr_scheduler",
    "WeightAverage": "mimatrix.engine.weight_average",
    "init": "mimatrix._init",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mimatrix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
