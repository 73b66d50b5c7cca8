"""The cluster that the ranks are: as it was described, or as the links between them are found to be."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from mimatrix.cluster import Cluster, Device, load_cluster, read_cluster, write_cluster
from mimatrix.core.errors import UserError
from mimatrix.engine.planning.measure import PrepareContext, hosts_of, say, together
from mimatrix.profiler import measure_links, slow_pair_warnings, to_cluster


def described_cluster(ground: PrepareContext) -> Cluster | None:
    """The one that `MIMATRIX_CLUSTER` names on rank 0, if its devices can be the ranks. A collective."""
    said = together(ground, lambda: _described(ground.ranks) if ground.rank == 0 else None)
    return read_cluster(said[0], os.environ.get("MIMATRIX_CLUSTER", "MIMATRIX_CLUSTER")) if said[0] else None


def measured_cluster(ground: PrepareContext, devices: Sequence[Device]) -> Cluster:
    """What the links between all ranks make up. A collective."""
    said = ground.exchange.all({"name": socket.gethostname()})
    hosts = _named(hosts_of(ground), [str(message["name"]) for message in said])
    if ground.group is None:
        raise UserError("links are measured between ranks, and there is one; use mimatrix profile -n 2 or more")
    where = ground.device if ground.group.has_nccl else torch.device("cpu")
    links = measure_links(ground.group, hosts, where)
    for remark in slow_pair_warnings(links, hosts):
        say(ground, remark)
    return to_cluster(links, hosts, devices)


def _described(ranks: int) -> str | None:
    named = os.environ.get("MIMATRIX_CLUSTER", "")
    if not named or not Path(named).is_file():
        return None
    cluster = load_cluster(named)
    return write_cluster(cluster) if len(cluster.device_names) == ranks else None


def _named(hosts: Sequence[str], names: Sequence[str]) -> list[str]:
    """The hosts by names for people; those that are called the same are numbered."""
    found: dict[str, str] = {}
    for host, name in zip(hosts, names, strict=True):
        same = sum(each == name or each.startswith(f"{name}-") for each in found.values())
        found.setdefault(host, f"{name}-{same + 1}" if same else name)
    return [found[host] for host in hosts]
