"""Leaving when told: all ranks save between two global batches and end one batch later, by when all have joined in.

What the user's loop does after a step (its scheduler, say) belongs to that step, so the checkpoint is begun when the
loop asks for the next batch. Ranks without data hear of it at the end of that batch, which is done again later.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from mimatrix.engine.rank_exchange import Message

EXIT_PREEMPTED = 75
"""The exit code of a rank that has left (EX_TEMPFAIL): it can go on where it was."""


class Preemption:
    """Of one rank: whether somebody asked for it, and how far it is."""

    def __init__(self, is_asked: Callable[[], bool], folder: Path) -> None:
        self._is_asked = is_asked
        self.folder = folder
        self._is_due = self._has_saved = False
        self.ends = False
        """Whether this global batch was the last."""

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun."""
        return self._is_due or self._has_saved

    def tell(self) -> Message:
        """What a rank says at the end of a global batch."""
        return {"asked": self._is_asked(), "saved": self._has_saved}

    def hear(self, messages: Sequence[Message]) -> None:
        """What all said. One that was asked is enough."""
        self.ends = any(message["saved"] for message in messages)
        self._is_due = self._is_due or any(message["asked"] for message in messages)

    def between_batches(self, save: Callable[[], None]) -> None:
        """The loop asks for the next batch, on a rank that had data in the last."""
        if self._is_due and not self._has_saved:
            save()
            self._has_saved = True
