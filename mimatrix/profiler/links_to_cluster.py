"""Turn measured links into a cluster: hosts around one switch, and warnings about pairs that do not fit."""

from collections.abc import Iterator, Sequence

from mimatrix.cluster import Bus, Cluster, Device, Link, Node, Switch
from mimatrix.core.hosts import ranks_by_host
from mimatrix.core.units import format_rate
from mimatrix.profiler.links import Links

_SLOWER = 0.8
_SWITCH = "measured-switch"


def to_cluster(links: Links, hosts: Sequence[str], devices: Sequence[Device], name: str = "measured") -> Cluster:
    """Return a cluster with a node for each host, joined by one switch; a NIC gets the best rate that it showed.

    Pairs that are slower than that are listed by `slow_pair_warnings`.
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


def slow_pair_warnings(links: Links, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence for every two hosts whose link is much slower than the NIC of either."""
    return tuple(_find_slow_pairs(links, hosts))


def _find_slow_pairs(links: Links, hosts: Sequence[str]) -> Iterator[str]:
    members = ranks_by_host(hosts)
    for source, target in ((a, b) for a in members for b in members if a != b):
        rate = max(links.rate_bytes_per_s[a][b] for a in members[source] for b in members[target])
        nic_rate = min(_nic_rate(links, hosts, source), _nic_rate(links, hosts, target))
        if rate < _SLOWER * nic_rate:
            yield (
                f"{source} to {target} reaches {format_rate(rate)}, although both reach {format_rate(nic_rate)} with "
                "others; check the cables and switches between them"
            )


def _bus(links: Links, ranks: Sequence[int]) -> Bus | None:
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    if not pairs:
        return None
    # A message between two devices crosses the bus twice.
    latency = min(links.latency_s[a][b] for a, b in pairs) / 2
    return Bus(max(links.rate_bytes_per_s[a][b] for a, b in pairs), latency)


def _nic_rate(links: Links, hosts: Sequence[str], host: str) -> float:
    return max(max(links.rate_bytes_per_s[a][b], links.rate_bytes_per_s[b][a]) for a, b in _external_pairs(hosts, host))


def _nic_latency(links: Links, hosts: Sequence[str], host: str) -> float:
    """Return half of the latency to the nearest other host: the switch is in the middle."""
    return min(links.latency_s[a][b] for a, b in _external_pairs(hosts, host)) / 2


def _external_pairs(hosts: Sequence[str], host: str) -> list[tuple[int, int]]:
    ranks = range(len(hosts))
    return [(a, b) for a in ranks for b in ranks if hosts[a] == host != hosts[b]]
