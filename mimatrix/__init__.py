"""MiMatrix: train PyTorch models on clusters whose machines are not alike.

Start with `init`, which returns a `Run`; see `help(mimatrix.init)` and `help(mimatrix.Run)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mimatrix.core.errors import (
    ConfigError,
    MiMatrixError,
    MismatchError,
    PeerLost,
    ScheduleError,
    UnsuitedError,
    UserError,
    WorldError,
)

if TYPE_CHECKING:
    from mimatrix._init import init
    from mimatrix.engine.run import Run
    from mimatrix.hybrid.mode import Hybrid
    from mimatrix.planner.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Hybrid",
    "MiMatrixError",
    "MismatchError",
    "PeerLost",
    "Plan",
    "Run",
    "ScheduleError",
    "UnsuitedError",
    "UserError",
    "WorldError",
    "__version__",
    "init",
]

# The command and the server start without torch: these are imported with their first use.
_LAZY = {
    "Hybrid": "mimatrix.hybrid.mode",
    "Plan": "mimatrix.planner.plan",
    "Run": "mimatrix.engine.run",
    "init": "mimatrix._init",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mimatrix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
