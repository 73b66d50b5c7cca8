"""Up and down. What goes up is written down first, and what is there is found by name: so `down` needs no memory."""

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
from mimatrix.lab.system import check_machine, inhabitants, kill, namespaces, order, within
from mimatrix.processes.cgroups import add_quotas, cpu_cgroups

_TERM_S, _KILL_S = 2.0, 5.0


@dataclass(frozen=True, slots=True)
class Removed:
    """What `down` found and removed."""

    namespaces: int
    groups: int
    processes: int
    written: bool

    @property
    def nothing(self) -> bool:
        """There was no lab of that name."""
        return not (self.namespaces or self.groups or self.written)


def up(
    cluster: Cluster, name: str = "lab", cpus: tuple[float, ...] = (), show: Callable[[float], None] = lambda _: None
) -> Lab:
    """Make the lab of a cluster, or nothing: what fails midway is removed. `show` gets the part that is done."""
    check_name(name)
    check_machine()
    lab = Lab(name, cluster, cpus)
    # Before anything exists: a cluster that no lab can be is refused here.
    layout = lab.layout
    if namespaces(ip_commands.prefix(name)):
        _refuse_remains(lab)
    state.claim(lab)
    try:
        order(["ip", "-batch", "-"], ip_commands.add_namespaces(layout, name))
        order(["ip", "-batch", "-"], ip_commands.add_cables(layout, name))
        for done, space in enumerate(layout.spaces):
            show(done / len(layout.spaces))
            order(within(ip_commands.namespace(name, space.name), "sh", "-e"), ip_commands.furnish(space))
        if cpus:
            add_quotas([ip_commands.namespace(name, node.name) for node in cluster.nodes], cpus)
        return state.finish(lab)
    except BaseException:
        down(name)
        raise


def down(name: str = "lab") -> Removed:
    """Remove everything of a lab: its processes, namespaces, control groups, what is written. Twice does no harm."""
    check_name(name)
    check_machine()
    killed = _end_processes(name)
    spaces = namespaces(ip_commands.prefix(name))
    order(["ip", "-batch", "-"], "".join(f"netns delete {space}\n" for space in spaces))
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
    """Ask those that run in the lab to end, then make them; how many there were."""
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
