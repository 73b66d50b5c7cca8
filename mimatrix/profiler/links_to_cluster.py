"""Measured links as a cluster: hosts around one switch, and what does not fit that picture."""

from collections.abc import Iterator, Sequence

from mimatrix.cluster import Bus, Cluster, Device, Link, Node, Switch
from mimatrix.core.hosts import ranks_by_host
from mimatrix.core.units import format_rate
from mimatrix.profiler.links import Links

_SLOWER = 0.8
_SWITCH = "measured-switch"


def to_cluster(links: Links, hosts: Sequence[str], devices: Sequence[Device], name: str = "measured") -> Cluster:
    """A node for each host with its ranks' devices, joined by one switch: a NIC has the best rate that it showed.

    `remarks` says which pairs this makes faster than they are.
    """
    members = ranks_by_host(hosts)
    names = {host: host.replace("/", "-").replace("->", "-") for host in members}
    nodes = tuple(
        Node(names[host], tuple(devices[rank] for rank in ranks), _bus(links, ranks)) for host, ranks in members.items()
    )
    if len(members) == 1:
        return Cluster(name, nodes, (), ())
    cables = tuple(
        Link(names[host], _SWITCH, _nic_rate(links, hosts, host), _nic_latency(links, hosts, host)) for host in members
    )
    return Cluster(name, nodes, (Switch(_SWITCH),), cables)


def remarks(links: Links, hosts: Sequence[str]) -> tuple[str, ...]:
    """A sentence for every two hosts whose link is much slower than either's NIC."""
    return tuple(_remarks(links, hosts))


def _remarks(links: Links, hosts: Sequence[str]) -> Iterator[str]:
    members = ranks_by_host(hosts)
    for source, target in ((a, b) for a in members for b in members if a != b):
        rate = max(links.rate_bytes_per_s[a][b] for a in members[source] for b in members[target])
        ends = min(_nic_rate(links, hosts, source), _nic_rate(links, hosts, target))
        if rate < _SLOWER * ends:
            yield (
                f"{source} to {target} has {format_rate(rate)}, although both reach {format_rate(ends)} with others; "
                "look at the cables and switches between them"
            )


def _bus(links: Links, ranks: Sequence[int]) -> Bus | None:
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    if not pairs:
        return None
    # Up to the host and down again: the bus is crossed twice.
    latency = min(links.latency_s[a][b] for a, b in pairs) / 2
    return Bus(max(links.rate_bytes_per_s[a][b] for a, b in pairs), latency)


def _nic_rate(links: Links, hosts: Sequence[str], host: str) -> float:
    return max(max(links.rate_bytes_per_s[a][b], links.rate_bytes_per_s[b][a]) for a, b in _abroad(hosts, host))


def _nic_latency(links: Links, hosts: Sequence[str], host: str) -> float:
    """Half of the way to the nearest other host: the switch is in the middle."""
    return min(links.latency_s[a][b] for a, b in _abroad(hosts, host)) / 2


def _abroad(hosts: Sequence[str], host: str) -> list[tuple[int, int]]:
    ranks = range(len(hosts))
    return [(a, b) for a in ranks for b in ranks if hosts[a] == host != hosts[b]]
