"""What a shard has applied: versions, samples, and the pushes of each group by number. No torch here.

A push that comes again, since its group did not hear that it was applied, is known by its number and not applied twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mimatrix.core.errors import WorldError


@dataclass(frozen=True, slots=True)
class Push:
    """What a group sends, beside the numbers themselves."""

    group: int
    number: int
    """Of this group's pushes, from 1."""
    samples: int
    nominal: int
    """Samples that its pushes usually have: the last one of an epoch may have fewer, and counts as the others do."""
    seen: int
    """The version that its parameters had."""
    life: int = 0
    """How often the group has joined: pushes of one that was started again since are refused."""


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """It counts now, or did before."""

    version: int
    """Of the parameters with it."""
    staleness: int
    again: bool
    """Whether it had come before."""
    waited_s: float = 0.0
    """For pushes of others before it."""


@dataclass
class PushLog:
    """Of one shard."""

    version: int = 0
    samples: int = 0
    pushes: dict[int, int] = field(default_factory=dict)
    """The last number of each group."""
    applied: dict[int, AppliedPush] = field(default_factory=dict)
    """What became of it."""
    lives: dict[int, int] = field(default_factory=dict)
    """How often each group has joined."""

    def known(self, push: Push) -> AppliedPush | None:
        """What became of this push, if it came before. A gap is an error: pushes of a group come in order."""
        if push.life != self.lives.get(push.group, 0):
            raise WorldError(f"group {push.group} was started again, and this is the one before; it is refused")
        last = self.pushes.get(push.group, 0)
        if push.number == last:
            found = self.applied[push.group]
            return AppliedPush(found.version, found.staleness, again=True)
        if push.number != last + 1:
            raise WorldError(
                f"group {push.group} pushes number {push.number} after {last}; it has lost track, start it again"
            )
        return None

    def staleness(self, push: Push) -> int:
        """Pushes that were applied since the group took its parameters."""
        if push.seen > self.version:
            raise WorldError(f"group {push.group} has version {push.seen} of a shard that is at {self.version}")
        return self.version - push.seen

    def enter(self, push: Push, stepped: int | None = None) -> AppliedPush:
        """It is applied. `stepped`: samples of the step that it completes; 0 where it waits for others, or is late."""
        staleness, steps = self.staleness(push), stepped != 0
        self.version += steps
        self.samples += push.samples if stepped is None else stepped
        found = AppliedPush(self.version, staleness, again=False)
        self.pushes[push.group], self.applied[push.group] = push.number, found
        return found

    def join(self, group: int, number: int, life: int) -> None:
        """A group comes, perhaps once more: its pushes go on after `number`."""
        self.lives[group] = life
        self.forgo(group, number)

    def forgo(self, group: int, number: int) -> None:
        """What is missing of a group's pushes up to this one will not come any more."""
        if self.pushes.get(group, 0) < number:
            self.pushes[group], self.applied[group] = number, AppliedPush(self.version, 0, again=False)

    def to_json(self) -> dict[str, object]:
        """For a checkpoint, and for a mirror that begins."""
        applied = {str(group): [each.version, each.staleness] for group, each in self.applied.items()}
        return {
            "version": self.version,
            "samples": self.samples,
            "pushes": {str(group): number for group, number in self.pushes.items()},
            "applied": applied,
            "lives": {str(group): life for group, life in self.lives.items()},
        }

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> "PushLog":
        """The same again."""
        pushes, applied, lives = found["pushes"], found["applied"], found["lives"]
        version, samples = found["version"], found["samples"]
        assert isinstance(pushes, Mapping)
        assert isinstance(applied, Mapping)
        assert isinstance(lives, Mapping)
        assert isinstance(version, int)
        assert isinstance(samples, int)
        return cls(
            version,
            samples,
            {int(group): int(number) for group, number in pushes.items()},
            {int(group): AppliedPush(int(at), int(late), again=False) for group, (at, late) in applied.items()},
            {int(group): int(life) for group, life in lives.items()},
        )
