"""Processes on machines: the workers of a job, with the variables of torchrun. So far on this machine."""

from mimatrix.launch.local import Launch, Outcome, run_local
from mimatrix.launch.requests import check, module_words, parse_memory, parse_speeds, script_words

__all__ = ["Launch", "Outcome", "check", "module_words", "parse_memory", "parse_speeds", "run_local", "script_words"]
