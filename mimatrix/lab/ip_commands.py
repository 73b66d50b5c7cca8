"""A layout as commands for `ip`, `tc` and `sh`: pure text, run elsewhere.

**How links are shaped.** Each end of a cable sends through a token bucket (`tbf`), so that both directions have the
link's rate. Frames are 9,000 bytes long, of which TCP carries 8,948; the bucket runs faster by that ratio, so that the
*payload* of a long TCP stream has the rate that the link says. The bucket is `BURST_S` of that rate deep, at least a
few frames: what fits in it passes at once. The queue before it takes `QUEUE_S` of traffic, at least `QUEUE_BYTES`.

**How TCP is set.** The control is reno: every kernel allows it in namespaces, and streams that meet end sooner than
under bbr. An idle stream resumes at its old speed. Senders hand over a millisecond of data at a time, not 64 KiB (which
`tcp_tso_rtt_log` makes of short round trips), so that slow links are shared in small pieces. Windows stay unlimited:
where acknowledgements wait in the queues of other streams, a limited window would leave its link idle.
"""

from collections.abc import Iterator
from math import ceil

from mimatrix.lab.layout import LabLayout, Space

MTU = 9_000
PAYLOAD = (MTU - 52) / (MTU + 14)
"""The part of a full frame that is a TCP payload: less 20 bytes for IP, 32 for TCP, 14 for Ethernet around it."""
BURST_S, BURST_BYTES = 0.001, 4 * (MTU + 14)
QUEUE_S, QUEUE_BYTES = 0.01, 1 << 19

# Routes by source live in tables of their own, asked before the main one.
_FIRST_TABLE = 1_000

_SETTINGS = """\
set_all() { for file in $2; do [ ! -e "$file" ] || echo "$1" > "$file"; done; }
set_all 0 '/proc/sys/net/ipv4/conf/*/rp_filter'
set_all 1 '/proc/sys/net/ipv6/conf/*/disable_ipv6'
set_all 1 /proc/sys/net/ipv4/tcp_no_metrics_save
set_all 0 /proc/sys/net/ipv4/tcp_slow_start_after_idle
set_all 0 /proc/sys/net/ipv4/tcp_tso_rtt_log
set_all reno /proc/sys/net/ipv4/tcp_congestion_control
"""


def namespace(lab: str, space: str) -> str:
    """Return the name of the network namespace and of the control group of a node or switch."""
    return f"{prefix(lab)}{space}"


def prefix(lab: str) -> str:
    """Return the prefix of the names of everything that belongs to a lab; names of labs have no hyphen."""
    return f"mmx-{lab}-"


def add_namespaces(layout: LabLayout, lab: str) -> str:
    """Return a batch for `ip` that makes the namespaces."""
    return "".join(f"netns add {namespace(lab, space.name)}\n" for space in layout.spaces)


def add_cables(layout: LabLayout, lab: str) -> str:
    """Return a batch for `ip` that makes each cable, a pair of interfaces in their namespaces."""
    return "".join(
        f"link add name {cable.near.interface} mtu {MTU} netns {namespace(lab, cable.near.space)} type veth "
        f"peer name {cable.far.interface} mtu {MTU} netns {namespace(lab, cable.far.space)}\n"
        for cable in layout.cables
    )


def configure_space(space: Space) -> str:
    """Return a script for `sh -e` within the namespace: settings, shapes, addresses, routes."""
    forward = f"set_all {int(space.forwards)} /proc/sys/net/ipv4/ip_forward\n"
    return _SETTINGS + forward + _batch("tc", _shapes(space)) + _batch("ip", [*_addresses(space), *_routes(space)])


def shape(rate_bytes_per_s: float) -> str:
    """Return the token bucket of a link as arguments for `tc`."""
    wire = rate_bytes_per_s / PAYLOAD
    burst = max(ceil(wire * BURST_S), BURST_BYTES)
    queue = max(ceil(wire * QUEUE_S), QUEUE_BYTES)
    return f"tbf rate {ceil(wire * 8)}bit burst {burst} limit {queue}"


def _shapes(space: Space) -> Iterator[str]:
    for port in space.ports:
        yield f"qdisc replace dev {port.interface} root {shape(port.rate_bytes_per_s)}"


def _addresses(space: Space) -> Iterator[str]:
    yield "link set lo up"
    for port in space.ports:
        yield f"address add {port.address}/31 dev {port.interface}"
        yield f"link set {port.interface} up"


def _routes(space: Space) -> Iterator[str]:
    sources = sorted({route.source for route in space.routes if route.source})
    tables = {source: _FIRST_TABLE + index for index, source in enumerate(sources)}
    for route in space.routes:
        prefer = f" src {route.prefer}" if route.prefer else ""
        table = f" table {tables[route.source]}" if route.source else ""
        yield f"route replace {route.target}/32 via {route.via} dev {route.interface}{prefer}{table}"
    for source, number in tables.items():
        yield f"rule add from {source}/32 lookup {number} priority {number}"


def _batch(tool: str, lines: Iterator[str] | list[str]) -> str:
    return "\n".join([f"{tool} -batch - <<END", *lines, "END\n"])
