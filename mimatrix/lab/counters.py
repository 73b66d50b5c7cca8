"""Count what went over the links at the interfaces that sent it: after shaping, so dropped packets do not count.

The bytes include headers, about one in a hundred and fifty of a stream's; acknowledgements count on the way back.
"""

import json
from collections import Counter

from mimatrix.lab.ip_commands import namespace
from mimatrix.lab.state import Lab
from mimatrix.lab.system import check_machine, run_tool


def channel_bytes(lab: Lab) -> list[int]:
    """Return the bytes that each channel of `Fabric.channels` has carried since the lab is up; 0 for buses."""
    check_machine()
    sent: dict[tuple[str, str], int] = {}
    for space in lab.layout.spaces:
        for port in json.loads(run_tool(["ip", "-n", namespace(lab.name, space.name), "-s", "-j", "link", "show"])):
            sent[space.name, port["ifname"]] = port["stats64"]["tx"]["bytes"]
    ports = lab.layout.ports
    return [
        sent[ports[channel].space, ports[channel].interface] if channel in ports else 0
        for channel in range(len(lab.layout.fabric.channels))
    ]


def link_bytes(lab: Lab) -> dict[str, int]:
    """Return the bytes by the channel's name, as in `n0->hub`; parallel cables share a name and are summed."""
    total: Counter[str] = Counter()
    for channel, count in zip(lab.layout.fabric.channels, channel_bytes(lab), strict=True):
        total[channel.name] += count
    return dict(total)
