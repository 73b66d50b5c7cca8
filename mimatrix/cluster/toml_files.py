"""Reading and writing clusters as TOML files. Reading a written file gives an equal cluster."""

import dataclasses
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from mimatrix.cluster.model import MOST_PARTS, Bus, Cluster, Device, Link, Node, Switch
from mimatrix.cluster.topologies import topology_from_name
from mimatrix.core.config import Table, read_table
from mimatrix.core.errors import ConfigError, UserError, nearest
from mimatrix.core.units import parse_bytes, parse_rate, parse_seconds


def load_cluster(text: str) -> Cluster:
    """Load the value of `--cluster`: a TOML file if one of that name exists, otherwise a topology such as `star:8`."""
    path = Path(text)
    if path.suffix == ".toml" or _is_file(path):
        return read_cluster(_read_text(path), name=str(path))
    return topology_from_name(text)


def read_cluster(text: str, name: str = "cluster.toml") -> Cluster:
    """Read a cluster from TOML text; errors name the line, the key and the nearest match."""
    root = read_table(name, text)
    title = root.take("name", str, "cluster")
    nodes = tuple(node for table in root.tables("node") for node in _read_nodes(table))
    switches = tuple(_read_switch(table) for table in root.tables("switch"))
    tables = root.tables("link")
    root.close()
    try:
        known = Cluster(title, nodes, switches, ()).kind_of
        return Cluster(title, nodes, switches, tuple(_read_link(table, known) for table in tables))
    except ConfigError:
        raise
    except UserError as error:
        raise ConfigError(f"{name}: {error}") from None


def write_cluster(cluster: Cluster) -> str:
    """Return the cluster as TOML text. Rates and times are written exactly, so that reading gives an equal cluster."""
    # Only writing needs it: machines that train may do without.
    import tomli_w

    return tomli_w.dumps(
        {
            "name": cluster.name,
            "switch": [_without_defaults(switch) for switch in cluster.switches],
            "node": [_node_table(node) for node in cluster.nodes],
            "link": [_link_table(link) for link in cluster.links],
        }
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A family with many settings is longer than a file's name can be.
        return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f'there is no cluster file "{path}"; give a TOML file or a family such as star:8') from None
    except (OSError, ValueError) as error:
        raise UserError(f'the cluster file "{path}" cannot be read ({error}); give a TOML file in UTF-8') from None


def _read_nodes(table: Table) -> list[Node]:
    """Read one node, or with `count = 3` three equal ones named `name0`, `name1`, `name2`."""
    name = table.take("name", str)
    devices = tuple(device for entry in table.inline("devices") for device in _read_devices(entry))
    if not devices:
        raise table.fail("devices", "wanted one or more; add one, or leave the node out")
    bus = _read_bus(table.inner("bus"))
    forwards = table.take("forwards", bool, False)
    count = _whole(table, "count")
    table.close()
    names = [name] if count == 1 else [f"{name}{index}" for index in range(count)]
    return [Node(node, devices, bus, forwards) for node in names]


def _read_devices(entry: Table) -> list[Device]:
    kind = entry.take("kind", str, "gpu")
    memory = entry.parse("memory", parse_bytes, 0)
    count = _whole(entry, "count")
    entry.close()
    return [Device(kind, memory)] * count


def _read_bus(entry: Table | None) -> Bus | None:
    if entry is None:
        return None
    bus = Bus(entry.parse("rate", parse_rate), entry.parse("latency", parse_seconds, 0.0), _whole(entry, "fanout", 0))
    entry.close()
    return bus


def _read_switch(table: Table) -> Switch:
    switch = Switch(table.take("name", str), table.take("group", str, ""))
    table.close()
    return switch


def _read_link(table: Table, known: Collection[str]) -> Link:
    ends = table.take("between", list)
    if len(ends) != 2 or not all(isinstance(end, str) for end in ends):
        raise table.fail("between", 'wanted two names; write between = ["node0", "switch0"]')
    for end in ends:
        if end not in known:
            raise table.fail("between", f'there is no "{end}"{nearest(end, known)}')
    link = Link(
        ends[0],
        ends[1],
        rate_bytes_per_s=table.parse("rate", parse_rate),
        latency_s=table.parse("latency", parse_seconds, 0.0),
        parallel=_whole(table, "parallel"),
    )
    table.close()
    return link


def _whole(table: Table, key: str, least: int = 1) -> int:
    """Read an integer that is at least `least`, the default of an absent key."""
    count = table.take(key, int, least)
    if count < least:
        raise table.fail(key, f"wanted {least} or more, got {count}; leave the key out for {least}")
    if count > MOST_PARTS:
        raise table.fail(key, f"wanted {MOST_PARTS} at the most, got {count}; use a smaller number")
    return count


def _node_table(node: Node) -> dict[str, object]:
    devices = []
    for device, alike in groupby(node.devices):
        count = len(list(alike))
        memory = {"memory": f"{device.memory_bytes}B"} if device.memory_bytes else {}
        devices.append({"kind": device.kind} | memory | ({"count": count} if count > 1 else {}))
    table: dict[str, object] = {"name": node.name, "devices": devices}
    if node.bus:
        fanout = {"fanout": node.bus.fanout} if node.bus.fanout else {}
        table["bus"] = _speed_entries(node.bus.rate_bytes_per_s, node.bus.latency_s) | fanout
    return table | ({"forwards": True} if node.forwards else {})


def _link_table(link: Link) -> dict[str, object]:
    parallel = {"parallel": link.parallel} if link.parallel > 1 else {}
    return {"between": [link.a, link.b]} | _speed_entries(link.rate_bytes_per_s, link.latency_s) | parallel


def _speed_entries(rate_bytes_per_s: float, latency_s: float) -> dict[str, object]:
    """Whole bits per second where the rate is that; otherwise bytes per second with every digit."""
    bits = float(rate_bytes_per_s * 8)
    rate = f"{int(bits)}bit" if bits.is_integer() else f"{float(rate_bytes_per_s)!r}B"
    for scale, unit in ((10**9, "Gbit"), (10**6, "Mbit")):
        if bits % scale == 0:
            rate = f"{int(bits // scale)}{unit}"
            break
    latency = {"latency": _format_time(latency_s)} if latency_s else {}
    return {"rate": rate, **latency}


def _format_time(seconds: float) -> str:
    micro = f"{seconds * 1e6:.6g}us"
    return micro if parse_seconds(micro) == seconds else f"{float(seconds)!r}s"


def _without_defaults(switch: Switch) -> dict[str, object]:
    return {key: value for key, value in dataclasses.asdict(switch).items() if value != ""}
