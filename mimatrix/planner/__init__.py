"""Decide how much work each rank gets: plans from measurements, what-if questions, and changes while training.

`make_plan` answers a `Problem`; `scenario` makes one of `Measurements`, a cluster and devices to add.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimatrix.planner.mode_choice import ModeChoice, choose_mode
    from mimatrix.planner.model.curve import Curve
    from mimatrix.planner.model.plan import LeftOut, Plan, RankPlan
    from mimatrix.planner.model.problem import CommunicationModel, Problem
    from mimatrix.planner.model.profile import Communication, Measurements, ModelSize, Profile
    from mimatrix.planner.model.split import Batch, Split, resolve_batches
    from mimatrix.planner.planner import make_plan
    from mimatrix.planner.what_if import Addition, Scenario, scenario

__all__ = [
    "Addition",
    "Batch",
    "Communication",
    "CommunicationModel",
    "Curve",
    "LeftOut",
    "Measurements",
    "ModeChoice",
    "ModelSize",
    "Plan",
    "Problem",
    "Profile",
    "RankPlan",
    "Scenario",
    "Split",
    "choose_mode",
    "make_plan",
    "resolve_batches",
    "scenario",
]

_MODULES = {
    "mode_choice": ("ModeChoice", "choose_mode"),
    "model.curve": ("Curve",),
    "model.plan": ("LeftOut", "Plan", "RankPlan"),
    "model.problem": ("CommunicationModel", "Problem"),
    "model.profile": ("Communication", "Measurements", "ModelSize", "Profile"),
    "model.split": ("Batch", "Split", "resolve_batches"),
    "planner": ("make_plan",),
    "what_if": ("Addition", "Scenario", "scenario"),
}
# Imported on first use: a plan needs no NumPy, and `what_if` needs the network simulator.
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
