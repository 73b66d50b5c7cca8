"""The cluster that the ranks run on: as described in a file, or as its links are measured."""

import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from mimatrix.cluster import Cluster, Device, load_cluster, read_cluster, write_cluster
from mimatrix.comm.tuning.known_cluster import remember_cluster
from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.engine.planning.measure import PrepareContext, log_rank0, rank_hosts
from mimatrix.engine.rank_exchange import gather_or_raise
from mimatrix.profiler import measure_links, slow_pair_warnings, to_cluster


def load_described_cluster(context: PrepareContext) -> Cluster | None:
    """Return the cluster described by rank 0's file, or None if there is none with a device per rank. A collective."""
    texts = gather_or_raise(
        context.exchange, lambda: _read_description(context.world_size) if context.rank == 0 else None
    )
    return read_cluster(texts[0], environment.CLUSTER.get(default=environment.CLUSTER.name)) if texts[0] else None


def discover_cluster(context: PrepareContext, devices: Sequence[Device]) -> Cluster:
    """Measure the links between all ranks and return the cluster that they form. A collective."""
    messages = context.exchange.all_gather({"name": socket.gethostname()})
    hosts = _name_hosts(rank_hosts(context), [str(message["name"]) for message in messages])
    if context.group is None:
        raise UserError("links are measured between ranks, and there is only one; use mimatrix profile -n 2 or more")
    device = context.device if context.group.has_nccl else torch.device("cpu")
    links = measure_links(context.group, hosts, device)
    for warning in slow_pair_warnings(links, hosts):
        log_rank0(context, warning)
    cluster = to_cluster(links, hosts, devices)
    remember_cluster(context.group.endpoint, cluster)
    return cluster


def _read_description(ranks: int) -> str | None:
    file = environment.CLUSTER.get()
    if not file or not Path(file).is_file():
        return None
    cluster = load_cluster(file)
    return write_cluster(cluster) if len(cluster.device_names) == ranks else None


def _name_hosts(hosts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Replace hosts by readable names; hosts with the same name are numbered."""
    name_of: dict[str, str] = {}
    for host, name in zip(hosts, names, strict=True):
        same = sum(other == name or other.startswith(f"{name}-") for other in name_of.values())
        name_of.setdefault(host, f"{name}-{same + 1}" if same else name)
    return [name_of[host] for host in hosts]
