"""What the hardware is: devices in nodes, switches, links; families of networks; routes through them."""

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.model import Bus, Cluster, Device, Link, Node, Switch
from mimatrix.cluster.routes import BySource, Ecmp, Routes
from mimatrix.cluster.toml_files import load_cluster, read_cluster, write_cluster
from mimatrix.cluster.topologies import FAMILIES, named

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
    "named",
    "read_cluster",
    "write_cluster",
]
