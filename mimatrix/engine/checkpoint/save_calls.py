"""The calls of `run.save`: what they were given, and what has to be the same on all ranks."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.metric import Metric
from mimatrix.engine.checkpoint.user_state import UserState


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCalls:
    """How often `run.save` was called on a rank, and with which arguments last."""

    count: int = 0
    folder: str = ""
    keep: int = 1
    metric: float | None = None
    best: str = "max"
    automatic: bool = False
    """Whether it is a periodic save or one for preemption, which the script did not ask for."""

    def to_metric(self) -> Metric | None:
        """Return the metric by which checkpoints of the folder are kept, if they are."""
        return None if self.metric is None else Metric(self.metric, self.best)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveArguments:
    """What one rank brings to a save, for the other ranks."""

    calls: SaveCalls
    given_at: int
    """The number of the call that was given this rank's state of the user."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of each entry of that state, if this call was given it."""
    late: bool
    """Whether the rank had no data: it did not come to the call, and follows the other ranks."""

    @classmethod
    def of(cls, calls: SaveCalls, user_state: UserState, *, late: bool) -> "SaveArguments":
        """Describe the arguments of this rank's call."""
        is_given = user_state.given_at == calls.count and not late
        digests = user_state.digests() if is_given else {}
        return cls(calls=calls, given_at=user_state.given_at, digests=digests, late=late)

    @property
    def has_user_state(self) -> bool:
        """Whether this call was given a state of the user."""
        return self.given_at == self.calls.count

    def to_json(self) -> list[Any]:
        """Return what `from_json` reads."""
        return [astuple(self.calls), self.given_at, dict(self.digests), self.late]

    @classmethod
    def from_json(cls, message: Sequence[Any]) -> "SaveArguments":
        """Read what `to_json` gave."""
        calls, given_at, digests, late = message
        calls = SaveCalls(**dict(zip((part.name for part in fields(SaveCalls)), calls, strict=True)))
        return cls(calls=calls, given_at=given_at, digests=digests, late=late)


def check_keep(keep: Any) -> int:
    """Return how many checkpoints to keep; refuse what is not a whole number of at least 1."""
    try:
        number = operator.index(keep)
    except TypeError:
        number = 0
    if number < 1:
        raise UserError(f"keep is {keep!r}; give the number of checkpoints to keep, at least 1")
    return number


def check_folder(folder: str) -> None:
    """Refuse a folder that cannot be made, as there is a file in its place or on the way to it."""
    path = Path(folder).absolute()
    for part in (path, *path.parents):
        if part.is_dir():
            return
        if part.is_file():
            raise UserError(f"run.save was given the folder {folder}, but {part} is a file; give another folder")


def check_same_arguments(arguments: Sequence[SaveArguments]) -> None:
    """Refuse a call of `run.save` whose arguments differ between ranks; the same sentence on all of them."""
    first = arguments[0].calls
    for rank, other in enumerate(arguments):
        calls = other.calls
        for name, one, value in (
            ("folder", first.folder, calls.folder),
            ("keep", first.keep, calls.keep),
            ("best", first.best, calls.best),
        ):
            if one != value:
                raise UserError(
                    f"run.save was given {name}={one!r} on rank 0 and {name}={value!r} on rank {rank}; give it the "
                    "same on all ranks"
                )
        if repr(calls.metric) != repr(first.metric):
            raise UserError(
                f"the metric is {first.metric} on rank 0 and {calls.metric} on rank {rank}; give run.save the same on "
                "all ranks, such as a result of run.evaluate"
            )
    _check_same_user_state([(rank, each) for rank, each in enumerate(arguments) if not each.late])


def _check_same_user_state(came: Sequence[tuple[int, SaveArguments]]) -> None:
    """Refuse a state of the user that differs between the ranks that came to the call."""
    for rank, other in came[1:]:
        first_rank, first = came[0]
        if first.has_user_state != other.has_user_state:
            with_one, without = (first_rank, rank) if first.has_user_state else (rank, first_rank)
            raise UserError(
                f"run.save was given user_state on rank {with_one} and none on rank {without}; give it the same on all "
                "ranks"
            )
        for key in {**first.digests, **other.digests}:
            if first.digests.get(key) != other.digests.get(key):
                raise UserError(
                    f"user_state[{key}] differs between rank {first_rank} and rank {rank}; a checkpoint has one for "
                    "all ranks: give run.save the same on all of them, or leave it out"
                )
