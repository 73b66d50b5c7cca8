"""HDRM: halving-doubling whose ranks are placed so that no two transfers of a step share a link.

On a BiGraph the placement is a closed form (docs/decisions/0004); on a leaf-spine network ranks are numbered leaf by
leaf and each source has its own spine. No publication covers sizes other than powers of two: this one folds the extra
ranks onto partners, on the opposite side if there is room.
"""

from collections import defaultdict
from dataclasses import dataclass

from mimatrix.cluster.fabric import Fabric
from mimatrix.cluster.routes import BySource, Ecmp, Routes
from mimatrix.collectives.halving_doubling import largest_power_of_two
from mimatrix.core.errors import UnsuitedError

UPPER, LOWER = 0, 1


@dataclass(frozen=True, slots=True)
class RankMapping:
    """HDRM's placement: the device of each rank, how many ranks form the power-of-two core, and the routes to use."""

    placement: tuple[int, ...]
    core: int
    routes: Routes


def side(rank: int) -> int:
    """Return the side of a rank: upper for an even number of one bits, otherwise lower.

    Partners differ in one bit, so they sit on opposite sides.
    """
    return rank.bit_count() % 2


def switch_and_port(rank: int, switches: int) -> tuple[int, int]:
    """Return the switch (of its side) and the port on it for a core rank; `switches` per side, a power of two."""
    group, within = divmod(rank, 2 * switches)
    pair = within // 2
    return ((pair + group) % switches if side(rank) == UPPER else pair), group


def map_ranks(fabric: Fabric, ranks: int) -> RankMapping:
    """Return HDRM's placement on a BiGraph or a leaf-spine network; refuse other networks."""
    groups = {switch.group for switch in fabric.cluster.switches}
    if groups == {"upper", "lower"}:
        return _on_bigraph(fabric, ranks)
    if groups == {"leaf", "spine"}:
        return _on_leaf_spine(fabric, ranks)
    raise UnsuitedError(
        f"hdrm needs a BiGraph (switches in the groups upper and lower) or a leaf-spine network, and "
        f'"{fabric.cluster.name}" is neither; use halving_doubling'
    )


def _on_bigraph(fabric: Fabric, ranks: int) -> RankMapping:
    ports = _ports(fabric)
    _refuse_missing_links(fabric)
    reached = sum(len(on) for half in ports for on in half)
    if ranks > reached:
        raise UnsuitedError(
            f"hdrm reaches {reached} devices on the BiGraph's switches, not {ranks}; use halving_doubling"
        )
    switches, endpoints = _core_shape(min(map(len, ports)), min(len(on) for half in ports for on in half), ranks)
    core = 2 * switches * endpoints
    placement: list[int] = []
    for rank in range(core):
        switch, port = switch_and_port(rank, switches)
        placement.append(ports[side(rank)][switch][port])
    taken = set(placement)
    free = [[device for on in half for device in on if device not in taken] for half in ports]
    for rank in range(core, ranks):
        opposite = 1 - side(rank % core)
        placement.append((free[opposite] or free[1 - opposite]).pop(0))
    return RankMapping(tuple(placement), core, _cables(fabric, placement, switches))


def _cables(fabric: Fabric, placement: list[int], switches: int) -> Routes:
    """Return routes on which groups of ranks that would share one of several parallel cables take turns."""
    if all(link.parallel == 1 for link in fabric.cluster.links):
        return Ecmp()
    turn = [0] * len(fabric.exits)
    for rank, device in enumerate(placement):
        turn[device] = rank // (2 * switches) // switches
    return BySource(tuple(turn))


def _core_shape(switches: int, endpoints: int, ranks: int) -> tuple[int, int]:
    """Return the largest power-of-two BiGraph that fits both the network and the ranks: (switches, endpoints)."""
    across = min(largest_power_of_two(switches), largest_power_of_two(max(1, ranks // 2)))
    deep = min(largest_power_of_two(endpoints), largest_power_of_two(max(1, ranks // (2 * across))))
    return across, deep


def _ports(fabric: Fabric) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each side the devices on each of its switches."""
    on: dict[int, list[int]] = defaultdict(list)
    for device, exits in enumerate(fabric.exits):
        for way in exits[:1]:
            on[way.core].append(device)
    switches = fabric.cluster.switches
    upper = [on[core] for core, switch in enumerate(switches) if switch.group == "upper"]
    lower = [on[core] for core, switch in enumerate(switches) if switch.group == "lower"]
    if not all(upper + lower):
        raise UnsuitedError(
            f'a switch of "{fabric.cluster.name}" has no device on it, and hdrm needs some on every switch; '
            f"use halving_doubling"
        )
    return upper, lower


def _refuse_missing_links(fabric: Fabric) -> None:
    switches = fabric.cluster.switches
    joined = {(tail, head) for _, tail, head in fabric.core_channels}
    for a, upper in enumerate(switches):
        for b, lower in enumerate(switches):
            if upper.group == "upper" and lower.group == "lower" and (a, b) not in joined:
                raise UnsuitedError(f"a BiGraph has a link between {upper.name} and {lower.name}; add it, or use ring")


def _on_leaf_spine(fabric: Fabric, ranks: int) -> RankMapping:
    """Place ranks leaf by leaf; each device sends up to the spine of its place on the leaf, so no uplink is shared."""
    on: dict[int, list[int]] = defaultdict(list)
    for device, exits in enumerate(fabric.exits):
        on[exits[0].core if exits else -1].append(device)
    spine_of = [0] * len(fabric.exits)
    for devices in on.values():
        for place, device in enumerate(devices):
            spine_of[device] = place
    placement = [device for devices in on.values() for device in devices][:ranks]
    return RankMapping(tuple(placement), largest_power_of_two(ranks), BySource(tuple(spine_of)))
