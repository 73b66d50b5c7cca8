"""Processes on machines: the workers of a job, with the variables of torchrun. So far on this machine."""

from typing import TYPE_CHECKING, Any

from mimatrix.launch.facts import cores
from mimatrix.launch.keeping import LocalLauncher
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

if TYPE_CHECKING:
    from mimatrix.launch.local import Launch, Outcome, run_local
    from mimatrix.launch.requests import check, module_words, parse_memory, parse_speeds, script_words

__all__ = [
    "DeviceFacts",
    "Launch",
    "Launcher",
    "LocalLauncher",
    "LogPart",
    "Member",
    "MemberState",
    "NodeFacts",
    "Outcome",
    "Phase",
    "Team",
    "TeamState",
    "check",
    "cores",
    "module_words",
    "parse_memory",
    "parse_speeds",
    "run_local",
    "script_words",
]

_RUNS = dict.fromkeys(("Launch", "Outcome", "run_local"), "local")
_REQUESTS = dict.fromkeys(("check", "module_words", "parse_memory", "parse_speeds", "script_words"), "requests")
# These need the lab, which needs SciPy. Every team has a keeper, which needs neither and is to start at once.
_LATER = _RUNS | _REQUESTS


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"mimatrix.launch.{_LATER[name]}"), name)
    raise AttributeError(f"module 'mimatrix.launch' has no attribute {name!r}")
