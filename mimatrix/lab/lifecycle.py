"""Make and remove labs. A lab is stored before it is made, and its parts are found by name, so `down` always works."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mimatrix.cluster.model import Cluster
from mimatrix.core.errors import UserError
from mimatrix.lab import ip_commands, state
from mimatrix.lab.state import Lab, check_name, down_command
from mimatrix.lab.system import check_machine, inhabitants, kill, namespaces, run_tool, within
from mimatrix.processes.cgroups import add_quotas, cpu_cgroups

_TERM_S, _KILL_S = 2.0, 5.0


@dataclass(frozen=True, slots=True)
class Removed:
    """How much `down` removed."""

    namespaces: int
    groups: int
    processes: int
    written: bool

    @property
    def nothing(self) -> bool:
        """Whether there was no lab of this name."""
        return not (self.namespaces or self.groups or self.written)


def up(
    cluster: Cluster, name: str = "lab", cpus: tuple[float, ...] = (), show: Callable[[float], None] = lambda _: None
) -> Lab:
    """Make the lab of a cluster, or nothing: what fails midway is removed. `show` gets the completed part."""
    check_name(name)
    check_machine()
    lab = Lab(name, cluster, cpus)
    # Before anything exists, since a cluster that cannot be a lab is refused here.
    layout = lab.layout
    if namespaces(ip_commands.prefix(name)):
        _refuse_remains(lab)
    state.claim(lab)
    try:
        run_tool(["ip", "-batch", "-"], ip_commands.add_namespaces(layout, name))
        run_tool(["ip", "-batch", "-"], ip_commands.add_cables(layout, name))
        for done, space in enumerate(layout.spaces):
            show(done / len(layout.spaces))
            run_tool(within(ip_commands.namespace(name, space.name), "sh", "-e"), ip_commands.configure_space(space))
        if cpus:
            add_quotas([ip_commands.namespace(name, node.name) for node in cluster.nodes], cpus)
        return state.finish(lab)
    except BaseException:
        down(name)
        raise


def down(name: str = "lab") -> Removed:
    """Remove everything of a lab: its processes, namespaces, control groups and files. Doing it twice is harmless."""
    check_name(name)
    check_machine()
    killed = _end_processes(name)
    spaces = namespaces(ip_commands.prefix(name))
    run_tool(["ip", "-batch", "-"], "".join(f"netns delete {space}\n" for space in spaces))
    groups = _groups(name)
    for group in groups:
        _until(partial(_removed, group), _KILL_S, f"the control group {group} is still in use; end what runs in it")
    return Removed(len(spaces), len(groups), killed, state.forget(name))


def _refuse_remains(lab: Lab) -> None:
    try:
        state.recall(lab.name)
    except UserError:
        raise UserError(
            f'remains of a lab "{lab.name}" are there; run `{down_command(lab.name)}` first, then `up` again'
        ) from None
    raise UserError(f'the lab "{lab.name}" is up already; run `{down_command(lab.name)}` first')


def _end_processes(name: str) -> int:
    """Terminate the processes in the lab, then kill them, and return how many there were."""
    seen = running = _running(name)
    kill(running, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_S
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        running = _running(name)
    deadline = time.monotonic() + _KILL_S
    while running := _running(name):
        seen |= running
        kill(running, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise UserError(f"processes {sorted(running)} of the lab do not end; end them, then run `down` again")
        time.sleep(0.02)
    return len(seen)


def _running(name: str) -> set[int]:
    grouped = {int(pid) for group in _groups(name) for pid in (group / "cgroup.procs").read_text().split()}
    return inhabitants(namespaces(ip_commands.prefix(name))) | grouped


def _groups(name: str) -> list[Path]:
    groups = cpu_cgroups()
    return groups.find(ip_commands.prefix(name)) if groups else []


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def _until(holds: Callable[[], bool], patience_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > deadline:
            raise UserError(otherwise)
        time.sleep(0.02)
