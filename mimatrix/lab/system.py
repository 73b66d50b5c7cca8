"""Run `ip` and `sh` on this machine, and find the namespaces and processes of a lab by their prefix."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.processes.proc import die_with_parent

NAMESPACES = Path("/run/netns")
_PATIENCE_S = 60.0


def check_machine() -> None:
    """Refuse a machine that lacks a tool or root."""
    missing = [tool for tool in ("ip", "tc", "sh") if not shutil.which(tool)]
    if missing:
        raise UserError(f"the lab needs {' and '.join(missing)}, not found here; install iproute2 (Linux only)")
    if os.geteuid() != 0:
        raise UserError("the lab makes network namespaces, which needs root; run it with sudo")


def run_tool(words: list[str], text: str = "") -> str:
    """Run a tool with `text` as its input and return what it printed; a failure is raised with its message."""
    try:
        done = subprocess.run(  # noqa: S603 (the words are ours)
            words, input=text, capture_output=True, text=True, timeout=_PATIENCE_S, preexec_fn=die_with_parent
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"`{' '.join(words)}` did not end within {_PATIENCE_S:g} s; try again") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"`{' '.join(words)}` failed ({said}); the lab needs root and a kernel with veth and tbf")
    return done.stdout


def within(namespace: str, *words: str) -> list[str]:
    """Return the command that runs `words` in a namespace."""
    return ["ip", "netns", "exec", namespace, *words]


def namespaces(prefix: str) -> list[str]:
    """Return the namespaces whose names start with `prefix`."""
    return sorted(path.name for path in NAMESPACES.glob(f"{prefix}*"))


def inhabitants(names: Iterable[str]) -> set[int]:
    """Return the processes that run in these namespaces, except this one."""
    inside = {_identity(NAMESPACES / name) for name in names} - {None}
    found = {pid for pid in _processes() if _identity(Path(f"/proc/{pid}/ns/net")) in inside} if inside else set()
    return found - {os.getpid()}


def kill(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those that are still alive."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 (a thousand names, no paths)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
