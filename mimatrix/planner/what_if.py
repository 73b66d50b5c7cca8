"""What if there were more devices: a cluster, or a set of measured ranks, with some added."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from mimatrix.cluster import Cluster
from mimatrix.cluster.model import Bus, Device, Link, Node
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_rate
from mimatrix.planner.model.profile import Communication

_NOTHING = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Addition:
    """So many devices of a kind."""

    kind: str
    count: int

    @classmethod
    def parse(cls, text: str) -> "Addition":
        """`RTX 3090:2`; without a number it is one."""
        found = re.fullmatch(r"\s*(?P<kind>[^:]*[^:\s])\s*(?::\s*(?P<count>\d+)\s*)?", text)
        count = int(found["count"] or 1) if found else 0
        if not found or not 1 <= count <= 1024:
            raise UserError(f'"{text}" is nothing to add; write a kind and a number from 1, as --add "RTX 3090:2"')
        return cls(found["kind"], count)


def with_node(cluster: Cluster, addition: Addition) -> tuple[Cluster, str]:
    """The cluster with one more node that holds the devices, on the switch with most nodes; and that as a sentence.

    The node is like those that are there: a kind that is known has its memory, the NIC is the median of the switch's.
    """
    switch, links = _busiest_switch(cluster)
    rate = median_low(link.rate_bytes_per_s for link in links)
    link = next(link for link in links if link.rate_bytes_per_s == rate)
    known = [device for node in cluster.nodes for device in node.devices if _alike(device.kind, addition.kind)]
    device = known[0] if known else Device(addition.kind)
    name = _new_name(cluster)
    node = Node(name, (device,) * addition.count, _bus(cluster) if addition.count > 1 else None)
    grown = replace(
        cluster,
        nodes=(*cluster.nodes, node),
        links=(*cluster.links, Link(name, switch, rate, link.latency_s)),
    )
    what = f"{addition.count} x {addition.kind}"
    return grown, f"{what} added as node {name} on switch {switch}, with one NIC of {format_rate(rate)}"


def measured_network(paid: Communication, ranks: int) -> Callable[[tuple[int, ...]], Communication]:
    """What other numbers of ranks would pay, from what `ranks` of them paid.

    In a ring and its like each rank moves (n-1)/n of a model, so that is how it grows. One rank paid nothing, which
    says nothing about more of them: they are free, too, and whoever asks can see that this is not known.
    """

    def network(members: tuple[int, ...]) -> Communication:
        if len(members) == 1:
            return Communication(_NOTHING, reason="one device moves nothing")
        if ranks == 1:
            return Communication(_NOTHING, reason="not measured: one rank alone")
        if len(members) == ranks or paid.is_free:
            return paid
        factor = _moved(len(members)) / _moved(ranks)
        reason = f"{paid.reason}; " if paid.reason else ""
        return Communication(
            tuple(factor * each for each in paid.once_s),
            tuple(factor * each for each in paid.round_s),
            f"{reason}as {ranks} ranks paid, for {len(members)} times {factor:.2f}",
        )

    return network


def _alike(kind: str, other: str) -> bool:
    return kind.lower() in other.lower() or other.lower() in kind.lower()


def _moved(ranks: int) -> float:
    return (ranks - 1) / ranks


def _busiest_switch(cluster: Cluster) -> tuple[str, Sequence[Link]]:
    """The switch that most nodes and devices hang on, and their links."""
    switches = {switch.name for switch in cluster.switches}
    nics: dict[str, list[Link]] = {}
    for link in cluster.links:
        if (link.a in switches) != (link.b in switches):
            nics.setdefault(link.a if link.a in switches else link.b, []).append(link)
    if not nics:
        raise UserError(
            f"nothing can be added to {cluster.name}, which has no switch that nodes hang on; describe the larger "
            f"cluster in a file"
        )
    name = max(nics, key=lambda name: len(nics[name]))
    return name, nics[name]


def _bus(cluster: Cluster) -> Bus | None:
    return next((node.bus for node in cluster.nodes if node.bus), None)


def _new_name(cluster: Cluster) -> str:
    names = (f"added{number or ''}" for number in range(len(cluster.kind_of) + 1))
    return next(name for name in names if name not in cluster.kind_of)
