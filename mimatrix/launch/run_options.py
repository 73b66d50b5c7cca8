"""What a person may ask for, and one sentence with the fix for what nobody can run."""

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from mimatrix.core.errors import UserError, nearest
from mimatrix.core.units import format_bytes, parse_bytes
from mimatrix.hybrid.groups import Groups, check_groups
from mimatrix.launch.local_run import Launch
from mimatrix.launch.throttle import WAYS

_MOST_RANKS = 4096
# A Python with torch takes more than this before it has done anything.
_LEAST_MEMORY = 64 << 20


def check(launch: Launch) -> None:
    """Refuse what cannot be run, before anything is started."""
    if not 1 <= launch.ranks <= _MOST_RANKS:
        raise UserError(f"{launch.ranks} ranks cannot be run here; use -n 1 to {_MOST_RANKS}")
    if launch.speeds and len(launch.speeds) != launch.ranks:
        raise UserError(
            f"--speeds has {len(launch.speeds)} numbers for {launch.ranks} ranks; give one for each, or use -n "
            f"{len(launch.speeds)}"
        )
    if launch.memory and len(launch.memory) != launch.ranks:
        raise UserError(
            f"--memory has {len(launch.memory)} sizes for {launch.ranks} ranks; give one for each, or one for all"
        )
    if launch.max_restarts < 0:
        raise UserError(f"{launch.max_restarts} restarts cannot be made; use --max-restarts 0 or more")
    if launch.threads is not None and launch.threads < 1:
        raise UserError(f"{launch.threads} threads cannot compute; use --threads 1 or more")
    if launch.slow_by and launch.slow_by not in WAYS:
        raise UserError(f'unknown way to slow down "{launch.slow_by}"{nearest(launch.slow_by, WAYS)}')


def parse_speeds(text: str) -> tuple[float, ...]:
    """`1,0.5,0.25`: how fast each rank is, as a part of full speed."""
    try:
        speeds = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UserError(f'"{text}" is no list of speeds; write for example --speeds 1,0.5,0.25') from None
    for speed in speeds:
        if not 0 < speed <= 1:
            raise UserError(f"a speed of {speed:g} is out of range; use more than 0 and at most 1 for each rank")
    return speeds


def parse_groups(text: str, ranks: int) -> Groups:
    """`0,1/2/3`: which ranks go together."""
    try:
        found = [[int(word) for word in part.split(",")] for part in text.split("/")]
    except ValueError:
        raise UserError(f'"{text}" is no list of groups; write for example --groups 0,1/2/3') from None
    return check_groups(found, ranks)


def parse_memory(text: str, ranks: int) -> tuple[int, ...]:
    """`2GB,512MB`: how many bytes each rank may use; a single one is for every rank."""
    sizes = tuple(parse_bytes(word) for word in text.split(","))
    for size in sizes:
        if size < _LEAST_MEMORY:
            raise UserError(f"a worker cannot live in {format_bytes(size)}; use --memory 512MB or so for each rank")
    return sizes * max(1, ranks) if len(sizes) == 1 else sizes


def script_words(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command of a worker that runs a script of Python; its lines come out as they are printed."""
    path = Path(script)
    if not (path.is_file() or (path / "__main__.py").is_file()):
        module = "; use -m to run a module" if _is_found(script) else ""
        raise UserError(f'there is no script "{script}" here{module or "; give the path of a file of Python"}')
    return (sys.executable, "-u", script, *arguments)


def module_words(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command of a worker that runs a module, as `python -m` does."""
    if not _is_found(module):
        raise UserError(f'there is no module "{module}"; install it, or start from the folder that holds it')
    return (sys.executable, "-u", "-m", module, *arguments)


def _is_found(module: str) -> bool:
    """Whether a worker would find the package that holds `module`; nothing of it is imported."""
    top = module.partition(".")[0]
    if not top.isidentifier():
        return False
    return bool(PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top))
