"""Processes on machines: the workers of a job, with the variables of torchrun. On this machine, or by Ray on many."""

from typing import TYPE_CHECKING, Any

from mimatrix.launch.devices import cores
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import (
    DeviceFacts,
    Launcher,
    LogPart,
    Member,
    MemberState,
    NodeFacts,
    Phase,
    Team,
    TeamState,
)
from mimatrix.launch.local.launcher import LocalLauncher

if TYPE_CHECKING:
    from mimatrix.launch.local_run import Launch, Outcome, run_local
    from mimatrix.launch.ray.auth import ray_environment
    from mimatrix.launch.ray.launcher import RayLauncher
    from mimatrix.launch.run_options import check, module_words, parse_groups, parse_memory, parse_speeds, script_words

__all__ = [
    "DeviceFacts",
    "EndedFor",
    "ExitCause",
    "ExitKind",
    "Launch",
    "Launcher",
    "LocalLauncher",
    "LogPart",
    "Member",
    "MemberState",
    "NodeFacts",
    "Outcome",
    "Phase",
    "RayLauncher",
    "Team",
    "TeamState",
    "check",
    "cores",
    "module_words",
    "parse_groups",
    "parse_memory",
    "parse_speeds",
    "ray_environment",
    "run_local",
    "script_words",
]

_RUNS = dict.fromkeys(("Launch", "Outcome", "run_local"), "local_run")
_REQUESTS = dict.fromkeys(
    ("check", "module_words", "parse_groups", "parse_memory", "parse_speeds", "script_words"), "run_options"
)
_RAY = {"RayLauncher": "ray.launcher", "ray_environment": "ray.auth"}
# The former need the lab, which needs SciPy. Every team has a keeper, which needs none of these and starts at once.
_LATER = _RUNS | _REQUESTS | _RAY


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"mimatrix.launch.{_LATER[name]}"), name)
    raise AttributeError(f"module 'mimatrix.launch' has no attribute {name!r}")
