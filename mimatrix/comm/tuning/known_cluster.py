"""The network of a job's ranks, as far as it is known: described in a file, or measured by an earlier job.

Member 0 looks for it and all members take what it found, so that all of them predict and choose alike. Device i of the
cluster is rank i of the job.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mimatrix.cluster import Cluster, load_cluster, read_cluster, write_cluster
from mimatrix.comm.endpoint import Endpoint
from mimatrix.core import environment
from mimatrix.core.cache import cache_folder
from mimatrix.core.errors import MiMatrixError, UserError
from mimatrix.core.files import write_atomic

_VERSION = 1
"""Of the stored files."""


@dataclass(frozen=True, slots=True)
class KnownCluster:
    """A cluster, and where it comes from, for people."""

    cluster: Cluster
    origin: str
    is_measured: bool


def find_cluster(endpoint: Endpoint, group: str, members: Sequence[int]) -> KnownCluster | None:
    """Return the cluster of a group of all ranks, the same on all of them; None if it is not known.

    Raises:
        UserError: The file that MIMATRIX_CLUSTER names on member 0 cannot be used.
    """
    if tuple(members) != tuple(range(endpoint.world_size)):
        return None
    key = f"mimatrix/cluster/{group}"
    if endpoint.rank == 0:
        endpoint.store.set(key, json.dumps(_look_up(endpoint)))
    found = json.loads(endpoint.store.get(key))
    if "error" in found:
        raise UserError(found["error"])
    if "text" not in found:
        return None
    return KnownCluster(read_cluster(found["text"], found["origin"]), found["origin"], found["is_measured"])


def remember_cluster(endpoint: Endpoint, cluster: Cluster) -> None:
    """Store a cluster that this job has measured, for the next one on the same hosts; only rank 0 does."""
    names = [location.host for location in endpoint.locations]
    is_host_by_host = len(set(names)) == 1 + sum(a != b for a, b in pairwise(names))
    if endpoint.rank or not is_host_by_host or len(set(names)) == 1:
        return  # devices of a measured cluster are numbered host by host
    file = _measured_file(endpoint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, write_cluster(cluster))
    except OSError:
        return  # without it the next job knows as much as this one did


def _look_up(endpoint: Endpoint) -> dict[str, object]:
    """Return the text of the cluster and its origin, an error, or nothing."""
    described = environment.CLUSTER.get()
    try:
        if described and Path(described).is_file():
            cluster = load_cluster(described)
            return _as_message(cluster, described, endpoint.world_size, is_measured=False)
        file = _measured_file(endpoint)
        if file.is_file():
            cluster = read_cluster(file.read_text(), file.name)
            return _as_message(cluster, "measured by an earlier job", endpoint.world_size, is_measured=True)
    except MiMatrixError as error:
        # A file of ours that is damaged is as good as none.
        return {"error": str(error)} if described and Path(described).is_file() else {}
    except OSError:
        return {}
    return {}


def _as_message(cluster: Cluster, origin: str, ranks: int, *, is_measured: bool) -> dict[str, object]:
    if len(cluster.device_names) != ranks:
        return {}
    return {"text": write_cluster(cluster), "origin": origin, "is_measured": is_measured}


def _measured_file(endpoint: Endpoint) -> Path:
    """Return where the cluster of these hosts is stored, by the machine of every rank."""
    hosts = [location.host for location in endpoint.locations]
    places = [[each.machine, hosts.index(each.host), each.facts] for each in endpoint.locations]
    digest = hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]
    return cache_folder("clusters") / f"v{_VERSION}-{digest}.toml"
