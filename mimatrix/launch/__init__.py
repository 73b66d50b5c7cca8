"""Start the workers of jobs, with the variables of torchrun: on this machine, or by Ray on many."""

from typing import TYPE_CHECKING, Any

from mimatrix.launch.devices import DeviceInfo, NodeInfo, cores
from mimatrix.launch.exit_causes import EndedFor, ExitCause, ExitKind
from mimatrix.launch.launcher import (
    Launcher,
    LogPart,
    Member,
    MemberState,
    Phase,
    Team,
    TeamState,
)
from mimatrix.launch.local.launcher import LocalLauncher
from mimatrix.launch.start_failure import StartError, StartFailure, is_transient

if TYPE_CHECKING:
    from mimatrix.launch.local_run import RunResult, RunSpec, run_local
    from mimatrix.launch.ray.auth import ray_environment
    from mimatrix.launch.ray.launcher import RayLauncher
    from mimatrix.launch.run_options import (
        module_command,
        parse_groups,
        parse_memory,
        parse_speeds,
        script_command,
        validate_run,
    )

__all__ = [
    "DeviceInfo",
    "EndedFor",
    "ExitCause",
    "ExitKind",
    "Launcher",
    "LocalLauncher",
    "LogPart",
    "Member",
    "MemberState",
    "NodeInfo",
    "Phase",
    "RayLauncher",
    "RunResult",
    "RunSpec",
    "StartError",
    "StartFailure",
    "Team",
    "TeamState",
    "cores",
    "is_transient",
    "module_command",
    "parse_groups",
    "parse_memory",
    "parse_speeds",
    "ray_environment",
    "run_local",
    "script_command",
    "validate_run",
]

_RUNS = dict.fromkeys(("RunResult", "RunSpec", "run_local"), "local_run")
_REQUESTS = dict.fromkeys(
    ("validate_run", "module_command", "parse_groups", "parse_memory", "parse_speeds", "script_command"), "run_options"
)
_RAY = {"RayLauncher": "ray.launcher", "ray_environment": "ray.auth"}
# Every team has a supervisor, which needs none of these and must start at once.
_LAZY = _RUNS | _REQUESTS | _RAY


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"mimatrix.launch.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'mimatrix.launch' has no attribute {name!r}")
