"""Options of a local run: parse them, and refuse what cannot be run with one sentence that has the fix."""

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from mimatrix.core.errors import UserError, nearest
from mimatrix.core.units import format_bytes, parse_bytes
from mimatrix.hybrid.groups import Groups, check_groups
from mimatrix.launch.local_run import RunSpec
from mimatrix.launch.throttle import METHODS

_MOST_RANKS = 4096
# A Python with torch takes more than this before it has done anything.
_LEAST_MEMORY = 64 << 20


def validate_run(spec: RunSpec) -> None:
    """Raise a `UserError` for what cannot be run, before anything is started."""
    if not 1 <= spec.ranks <= _MOST_RANKS:
        raise UserError(f"{spec.ranks} ranks cannot be run here; use -n 1 to {_MOST_RANKS}")
    if spec.speeds and len(spec.speeds) != spec.ranks:
        raise UserError(
            f"--speeds has {len(spec.speeds)} numbers for {spec.ranks} ranks; give one for each, or use -n "
            f"{len(spec.speeds)}"
        )
    if spec.memory and len(spec.memory) != spec.ranks:
        raise UserError(
            f"--memory has {len(spec.memory)} sizes for {spec.ranks} ranks; give one for each, or one for all"
        )
    if spec.max_restarts < 0:
        raise UserError(f"{spec.max_restarts} restarts cannot be made; use --max-restarts 0 or more")
    if spec.threads is not None and spec.threads < 1:
        raise UserError(f"{spec.threads} threads cannot compute; use --threads 1 or more")
    if spec.slow_by and spec.slow_by not in METHODS:
        raise UserError(f'unknown way to slow down "{spec.slow_by}"{nearest(spec.slow_by, METHODS)}')


def parse_speeds(text: str) -> tuple[float, ...]:
    """Parse `1,0.5,0.25`: how fast each rank is, as a fraction of full speed."""
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f'"{text}" is not a list of speeds; write for example --speeds 1,0.5,0.25') from None
    for speed in speeds:
        if not 0 < speed <= 1:
            raise UserError(f"a speed of {speed:g} is out of range; use more than 0 and at most 1 for each rank")
    return speeds


def parse_groups(text: str, ranks: int) -> Groups:
    """Parse `0,1/2/3`: which ranks form a group."""
    try:
        found = [[int(word) for word in part.split(",")] for part in text.split("/")]
    except ValueError:
        raise UserError(f'"{text}" is not a list of groups; write for example --groups 0,1/2/3') from None
    return check_groups(found, ranks)


def parse_memory(text: str, ranks: int) -> tuple[int, ...]:
    """Parse `2GB,512MB`: how many bytes each rank may use; a single size is for every rank."""
    sizes = tuple(parse_bytes(word) for word in text.split(","))
    for size in sizes:
        if size < _LEAST_MEMORY:
            raise UserError(
                f"{format_bytes(size)} is too little memory for a worker; use --memory 512MB or so for each rank"
            )
    return sizes * max(1, ranks) if len(sizes) == 1 else sizes


def script_command(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a worker that runs a Python script, whose lines appear as they are printed."""
    path = Path(script)
    if not (path.is_file() or (path / "__main__.py").is_file()):
        module = "; use -m to run a module" if _is_found(script) else ""
        raise UserError(f'there is no script "{script}" here{module or "; give the path of a file of Python"}')
    return (sys.executable, "-u", script, *arguments)


def module_command(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a worker that runs a module, as `python -m` does."""
    if not _is_found(module):
        raise UserError(f'there is no module "{module}"; install it, or start from the folder that holds it')
    return (sys.executable, "-u", "-m", module, *arguments)


def _is_found(module: str) -> bool:
    """Return whether a worker would find the package that holds `module`; nothing of it is imported."""
    top = module.partition(".")[0]
    if not top.isidentifier():
        return False
    return bool(PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top))
