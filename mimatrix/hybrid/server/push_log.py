"""What a shard has applied: its version, samples, and the last push of each group. No torch here.

A group that got no acknowledgement sends its push again. The shard recognises it by its number and does not apply it
twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mimatrix.core.errors import WorldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The metadata of one push; its gradient travels separately."""

    group: int
    number: int
    """Counts the pushes of this group, from 1."""
    samples: int
    nominal_samples: int
    """Samples of the group's usual pushes: a smaller last push of an epoch counts like the others."""
    base_version: int
    """The version of the parameters that the gradient was computed on."""
    incarnation: int = 0
    """How many times the group has joined; pushes of earlier incarnations are refused."""


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """The outcome of a push that was applied, now or before."""

    version: int
    """The version of the shard that first contains it."""
    staleness: int
    is_duplicate: bool
    """Whether it had already been applied."""
    waited_s: float = 0.0
    """How long it waited for pushes of others."""


@dataclass
class PushLog:
    """The pushes that one shard has applied."""

    version: int = 0
    samples: int = 0
    pushes: dict[int, int] = field(default_factory=dict)
    """The number of the last push of each group."""
    applied: dict[int, AppliedPush] = field(default_factory=dict)
    """The outcome of the last push of each group."""
    incarnations: dict[int, int] = field(default_factory=dict)
    """How many times each group has joined."""

    def find_duplicate(self, push: Push) -> AppliedPush | None:
        """Return the outcome of this push if it was applied before.

        Raises:
            WorldError: The push is of an earlier incarnation, or pushes before it are missing.
        """
        if push.incarnation != self.incarnations.get(push.group, 0):
            raise WorldError(
                f"a push of group {push.group} is refused: the group was started again; stop the old process"
            )
        last = self.pushes.get(push.group, 0)
        if push.number == last:
            applied = self.applied[push.group]
            return AppliedPush(applied.version, applied.staleness, is_duplicate=True)
        if push.number != last + 1:
            raise WorldError(
                f"group {push.group} sent push {push.number} after push {last}, so pushes were lost; restart the group"
            )
        return None

    def staleness(self, push: Push) -> int:
        """Return how many pushes were applied since the group pulled its parameters."""
        if push.base_version > self.version:
            raise WorldError(
                f"group {push.group} has version {push.base_version} of a shard that is at version {self.version}; "
                "restart the group"
            )
        return self.version - push.base_version

    def record(self, push: Push, step_samples: int | None = None) -> AppliedPush:
        """Record a push as applied.

        Args:
            push: The push.
            step_samples: Samples of the step that it completes, 0 if it completes none; None if every push is a step.
        """
        staleness, is_step = self.staleness(push), step_samples != 0
        self.version += is_step
        self.samples += push.samples if step_samples is None else step_samples
        applied = AppliedPush(self.version, staleness, is_duplicate=False)
        self.pushes[push.group], self.applied[push.group] = push.number, applied
        return applied

    def join(self, group: int, number: int, incarnation: int) -> None:
        """Let a group join, perhaps again: its next push is the one after `number`."""
        self.incarnations[group] = incarnation
        self.give_up(group, number)

    def give_up(self, group: int, number: int) -> None:
        """Stop expecting the missing pushes of a group up to `number`."""
        if self.pushes.get(group, 0) < number:
            self.pushes[group], self.applied[group] = number, AppliedPush(self.version, 0, is_duplicate=False)

    def contains(self, other: "PushLog") -> bool:
        """Return whether every push that the other log has is in this one, too."""
        return self.version >= other.version and all(
            self.pushes.get(group, 0) >= number for group, number in other.pushes.items()
        )

    def to_json(self) -> dict[str, object]:
        """Return the log as JSON values."""
        return {
            "version": self.version,
            "samples": self.samples,
            "pushes": {str(group): number for group, number in self.pushes.items()},
            "applied": {str(group): [push.version, push.staleness] for group, push in self.applied.items()},
            "incarnations": {str(group): number for group, number in self.incarnations.items()},
        }

    @classmethod
    def from_json(cls, encoded: Mapping[str, object]) -> "PushLog":
        """Restore a log from `to_json`."""
        pushes, applied, incarnations = encoded["pushes"], encoded["applied"], encoded["incarnations"]
        version, samples = encoded["version"], encoded["samples"]
        assert isinstance(pushes, Mapping)
        assert isinstance(applied, Mapping)
        assert isinstance(incarnations, Mapping)
        assert isinstance(version, int)
        assert isinstance(samples, int)
        return cls(
            version,
            samples,
            {int(group): int(number) for group, number in pushes.items()},
            {
                int(group): AppliedPush(int(version), int(staleness), is_duplicate=False)
                for group, (version, staleness) in applied.items()
            },
            {int(group): int(number) for group, number in incarnations.items()},
        )
