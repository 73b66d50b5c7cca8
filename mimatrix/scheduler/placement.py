"""Which free devices a job gets: those that finish it best, the nearer to one another the better."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mimatrix.core.device_kinds import match_kind
from mimatrix.core.resources import ANY, Wish
from mimatrix.scheduler.state import Policy, Seat


@dataclass(frozen=True, slots=True)
class Need:
    """So many devices of any of these kinds."""

    kinds: tuple[str, ...]
    least: int
    most: int


Needs = tuple[Need, ...]
Counts = Mapping[str, int]
Shape = tuple[tuple[str, int], ...]
SpeedOf = Callable[[str], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """So many devices of each kind, from one node, from nodes close to one another, or from anywhere."""

    counts: dict[str, int]
    node: str | None
    near: str | None


class Seating:
    """The devices that are free, counted so that thousands of jobs can ask."""

    def __init__(self, free: Iterable[Seat]) -> None:
        self._seats: dict[str, dict[str, list[Seat]]] = defaultdict(lambda: defaultdict(list))
        self.counts: Counter[str] = Counter()
        """By kind."""
        self._near_of: dict[str, str] = {}
        self._nearby: dict[str, Counter[str]] = defaultdict(Counter)
        self._by_shape: dict[Shape, dict[str, None]] = defaultdict(dict)
        self._shape_of: dict[str, Shape] = {}
        # Handed out from the end of each list, so that the first devices of a node go first.
        for seat in sorted(free, reverse=True):
            self._near_of[seat.node] = seat.near
            self._seats[seat.node][seat.kind].append(seat)
            self.counts[seat.kind] += 1
            self._nearby[seat.near][seat.kind] += 1
        for node in sorted(self._seats):
            self._reshape(node)

    def __iter__(self) -> Iterator[Seat]:
        return (seat for kinds in self._seats.values() for seats in kinds.values() for seat in seats)

    def add(self, seats: Iterable[Seat]) -> None:
        """These are free now."""
        for seat in seats:
            self._near_of[seat.node] = seat.near
            self._seats[seat.node][seat.kind].append(seat)
            self._seats[seat.node][seat.kind].sort(reverse=True)
            self.counts[seat.kind] += 1
            self._nearby[seat.near][seat.kind] += 1
            self._reshape(seat.node)

    def take(self, seats: Iterable[Seat]) -> None:
        """These are free no more."""
        for seat in seats:
            self._seats[seat.node][seat.kind].remove(seat)
            self.counts[seat.kind] -= 1
            self._nearby[seat.near][seat.kind] -= 1
            self._reshape(seat.node)

    def choose(self, needs: Needs, speed_of: SpeedOf, policy: Policy) -> tuple[Seat, ...] | None:
        """The best devices, in the order of the job's ranks; None where there are too few."""
        if chosen_of(needs, self.counts, speed_of) is None:
            return None
        best: tuple[float, int, str] | None = None
        found: Choice | None = None
        for factor, counts, node, near in self._regions(policy):
            chosen = chosen_of(needs, counts, speed_of)
            if chosen is None:
                continue
            rate = factor * sum(count * speed_of(kind) for kind, count in chosen.items())
            # Of two that are as fast, the one that leaves fewer devices of its region behind.
            rank = (-rate, sum(counts.values()) - sum(chosen.values()), node or near or "")
            if best is None or rank < best:
                best, found = rank, Choice(chosen, node, near)
        assert found, "all nodes together are a region, too"
        return self._picked(found)

    def _regions(self, policy: Policy) -> Iterable[tuple[float, Counts, str | None, str | None]]:
        # Nodes with the same devices free are as good as one another: the first of them speaks for all.
        for shape, nodes in self._by_shape.items():
            if shape:
                yield policy.same_node, dict(shape), next(iter(nodes)), None
        if len(self._nearby) > 1:
            for near, counts in self._nearby.items():
                yield policy.same_place, counts, None, near
        yield policy.same_place if len(self._nearby) == 1 else policy.anywhere, self.counts, None, None

    def _picked(self, choice: Choice) -> tuple[Seat, ...]:
        """Seats for it on few nodes, the fullest first; ranks of a node follow one another, and those of near nodes."""
        if choice.node is not None:
            nodes = [choice.node]
        else:
            wanted = choice.counts
            able = {
                node: sum(min(len(seats), wanted.get(kind, 0)) for kind, seats in kinds.items())
                for node, kinds in self._seats.items()
                if choice.near is None or self._near_of[node] == choice.near
            }
            nodes = sorted((node for node in able if able[node]), key=lambda node: (-able[node], node))
        left, picked = dict(choice.counts), []
        for node in nodes:
            for kind, seats in self._seats[node].items():
                count = min(left.get(kind, 0), len(seats))
                if count:
                    picked += seats[-count:]
                    left[kind] -= count
        assert not any(left.values()), "counted, and then not there"
        return tuple(sorted(picked, key=lambda seat: (seat.near, seat.node, seat.number)))

    def _reshape(self, node: str) -> None:
        before = self._shape_of.get(node)
        shape = tuple(sorted((kind, len(seats)) for kind, seats in self._seats[node].items() if seats))
        if before == shape:
            return
        if before is not None:
            del self._by_shape[before][node]
            if not self._by_shape[before]:
                del self._by_shape[before]
        self._shape_of[node] = shape
        self._by_shape[shape][node] = None


def chosen_of(needs: Needs, counts: Counts, speed_of: SpeedOf) -> dict[str, int] | None:
    """How many of each kind are taken for these needs, the fastest first; None where there are too few."""
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


@lru_cache(maxsize=16_384)
def needs_of(wish: Wish, kinds: tuple[str, ...], devices: int) -> Needs:
    """A wish in a cluster of these kinds. Who names a kind comes first: who takes any takes what is left."""
    found = (
        Need(kinds if part.kind == ANY else tuple(match_kind(part.kind, kinds)), part.least, part.most)
        for part in wish.within(devices).parts
    )
    return tuple(sorted(found, key=lambda need: len(need.kinds)))
