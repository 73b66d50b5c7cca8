"""The hardware as values: devices in nodes, switches and links; named topologies; routes through them."""

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.model import Bus, Cluster, Device, Link, Node, Switch
from mimatrix.cluster.routes import BySource, Ecmp, Routes
from mimatrix.cluster.toml_files import load_cluster, read_cluster, write_cluster
from mimatrix.cluster.topologies import FAMILIES, topology_from_name

__all__ = [
    "FAMILIES",
    "Bus",
    "BySource",
    "Cluster",
    "Device",
    "Ecmp",
    "Fabric",
    "Link",
    "Node",
    "Routes",
    "Switch",
    "load_cluster",
    "read_cluster",
    "topology_from_name",
    "write_cluster",
]
