"""Which free devices a job gets: those that finish it soonest, the closer to one another the better."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from mimatrix.scheduler.needs import Need, Needs
from mimatrix.scheduler.state import DeviceSlot, SchedulingPolicy

KindCounts = Mapping[str, int]
Shape = tuple[tuple[str, int], ...]
SpeedOf = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """Counts of each kind, from one node, from nodes close to one another, or from anywhere."""

    counts: dict[str, int]
    node: str | None
    rack: str | None


class FreeDevices:
    """The devices that are free, counted so that thousands of jobs can ask."""

    def __init__(self, free: Iterable[DeviceSlot]) -> None:
        self._devices: dict[str, dict[str, list[DeviceSlot]]] = defaultdict(lambda: defaultdict(list))
        self.counts: Counter[str] = Counter()
        """By kind."""
        self._rack_of: dict[str, str] = {}
        self._by_rack: dict[str, Counter[str]] = defaultdict(Counter)
        self._by_shape: dict[Shape, dict[str, None]] = defaultdict(dict)
        self._shape_of: dict[str, Shape] = {}
        # Handed out from the end of each list, so that the first devices of a node go first.
        for device in sorted(free, reverse=True):
            self._rack_of[device.node] = device.rack
            self._devices[device.node][device.kind].append(device)
            self.counts[device.kind] += 1
            self._by_rack[device.rack][device.kind] += 1
        for node in sorted(self._devices):
            self._reshape(node)

    def __iter__(self) -> Iterator[DeviceSlot]:
        return (device for kinds in self._devices.values() for devices in kinds.values() for device in devices)

    def add(self, devices: Iterable[DeviceSlot]) -> None:
        """Take note that these are free now."""
        for device in devices:
            self._rack_of[device.node] = device.rack
            self._devices[device.node][device.kind].append(device)
            self._devices[device.node][device.kind].sort(reverse=True)
            self.counts[device.kind] += 1
            self._by_rack[device.rack][device.kind] += 1
            self._reshape(device.node)

    def take(self, devices: Iterable[DeviceSlot]) -> None:
        """Take note that these are no longer free."""
        for device in devices:
            self._devices[device.node][device.kind].remove(device)
            self.counts[device.kind] -= 1
            self._by_rack[device.rack][device.kind] -= 1
            self._reshape(device.node)

    def choose(self, needs: Needs, speed_of: SpeedOf, policy: SchedulingPolicy) -> tuple[DeviceSlot, ...] | None:
        """Return the best devices, in the order of the job's ranks; None if there are too few."""
        if chosen_of(needs, self.counts, speed_of) is None:
            return None
        best: tuple[float, int, str] | None = None
        found: Choice | None = None
        for factor, counts, node, rack in self._regions(policy):
            chosen = chosen_of(needs, counts, speed_of)
            if chosen is None:
                continue
            rate = factor * sum(count * speed_of(kind) for kind, count in chosen.items())
            # Of two that are as fast, the one that leaves fewer devices of its region behind.
            rank = (-rate, sum(counts.values()) - sum(chosen.values()), node or rack or "")
            if best is None or rank < best:
                best, found = rank, Choice(chosen, node, rack)
        assert found, "all nodes together are a region, too"
        return self._picked(found)

    def _regions(self, policy: SchedulingPolicy) -> Iterable[tuple[float, KindCounts, str | None, str | None]]:
        # Nodes with the same devices free are as good as one another: the first of them speaks for all.
        for shape, nodes in self._by_shape.items():
            if shape:
                yield policy.same_node, dict(shape), next(iter(nodes)), None
        if len(self._by_rack) > 1:
            for rack, counts in self._by_rack.items():
                yield policy.same_place, counts, None, rack
        yield policy.same_place if len(self._by_rack) == 1 else policy.anywhere, self.counts, None, None

    def _picked(self, choice: Choice) -> tuple[DeviceSlot, ...]:
        """Pick slots on few nodes, the fullest first; ranks of one node and of one rack follow one another."""
        if choice.node is not None:
            nodes = [choice.node]
        else:
            wanted = choice.counts
            able = {
                node: sum(min(len(devices), wanted.get(kind, 0)) for kind, devices in kinds.items())
                for node, kinds in self._devices.items()
                if choice.rack is None or self._rack_of[node] == choice.rack
            }
            nodes = sorted((node for node in able if able[node]), key=lambda node: (-able[node], node))
        left, picked = dict(choice.counts), []
        for node in nodes:
            for kind, devices in self._devices[node].items():
                count = min(left.get(kind, 0), len(devices))
                if count:
                    picked += devices[-count:]
                    left[kind] -= count
        assert not any(left.values()), "counted, and then not there"
        return tuple(sorted(picked, key=lambda device: (device.rack, device.node, device.number)))

    def _reshape(self, node: str) -> None:
        before = self._shape_of.get(node)
        shape = tuple(sorted((kind, len(devices)) for kind, devices in self._devices[node].items() if devices))
        if before == shape:
            return
        if before is not None:
            del self._by_shape[before][node]
            if not self._by_shape[before]:
                del self._by_shape[before]
        self._shape_of[node] = shape
        self._by_shape[shape][node] = None


def chosen_of(needs: Needs, counts: KindCounts, speed_of: SpeedOf) -> dict[str, int] | None:
    """Return how many of each kind are taken for these needs, the fastest first; None if there are too few."""
    left, chosen = Counter(counts), Counter[str]()

    def missing(need: Need, wanted: int) -> int:
        for kind in sorted(need.kinds, key=lambda kind: (-speed_of(kind), kind)):
            count = min(wanted, left[kind])
            left[kind] -= count
            chosen[kind] += count
            wanted -= count
        return wanted

    # What must be comes before what may.
    if any(missing(need, need.least) for need in needs):
        return None
    for need in needs:
        missing(need, need.most - need.least)
    return {kind: count for kind, count in chosen.items() if count}
