"""Where only measurements are wanted (`mimatrix profile`): they are stored, and the script ends where it would train.

`MIMATRIX_PROFILE` names the file for the curves. `MIMATRIX_PROFILE_CLUSTER`, if it is there, one for the cluster that
the links between the ranks make up. On several machines all ranks need the same variables; rank 0 writes.
"""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from mimatrix.cluster import Device, write_cluster
from mimatrix.core.errors import UserError
from mimatrix.engine.surveying import Ground, hosts_of, say, survey, together
from mimatrix.planner.profile import Measurements
from mimatrix.profiler import measure_links, remarks, to_cluster


def is_asked() -> bool:
    """Whether this run is one that only measures."""
    return bool(os.environ.get("MIMATRIX_PROFILE"))


def store_and_end(ground: Ground) -> None:
    """Measure, write down and end well. A collective."""
    found = survey(ground)
    cluster = os.environ.get("MIMATRIX_PROFILE_CLUSTER")
    text = _cluster(ground, found) if cluster else ""
    together(ground, lambda: _write(found.to_text(), Path(os.environ["MIMATRIX_PROFILE"]), ground.rank))
    if cluster:
        together(ground, lambda: _write(text, Path(cluster), ground.rank))
    raise SystemExit(0)


def _cluster(ground: Ground, found: Measurements) -> str:
    """What the links between all ranks make up, as a cluster file."""
    devices = [Device(profile.device, profile.room_bytes) for profile in found.profiles]
    said = ground.exchange.all({"name": socket.gethostname()})
    hosts = _named(hosts_of(ground), [str(message["name"]) for message in said])
    if ground.group is None:
        raise UserError("links are measured between ranks, and there is one; use mimatrix profile -n 2 or more")
    where = ground.device if ground.group.has_nccl else torch.device("cpu")
    links = measure_links(ground.group, hosts, where)
    for remark in remarks(links, hosts):
        say(ground, remark)
    return write_cluster(to_cluster(links, hosts, devices))


def _named(hosts: Sequence[str], names: Sequence[str]) -> list[str]:
    """The hosts by names for people; those that are called the same are numbered."""
    found: dict[str, str] = {}
    for host, name in zip(hosts, names, strict=True):
        same = sum(each == name or each.startswith(f"{name}-") for each in found.values())
        found.setdefault(host, f"{name}-{same + 1}" if same else name)
    return [found[host] for host in hosts]


def _write(text: str, file: Path, rank: int) -> None:
    if rank:
        return
    try:
        partial = file.with_name(file.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise UserError(f'"{file}" cannot be written ({error.strerror}); choose another file') from None
