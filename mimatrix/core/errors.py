"""The one tree of errors.

    MiMatrixError
    ├── UserError            the person can fix it: one sentence, and the fix
    │   ├── ConfigError      ... in a file: where, which key, the nearest match
    │   ├── UnsuitedError    ... for this algorithm; another one can do it
    │   └── DifferentCalls   ... ranks make different calls: both ranks, both calls, with their lines
    ├── WorldError           something outside the program failed
    │   ├── PeerLost         a rank is gone or silent: which, on which host, in which collective, since when
    │   ├── MismatchError    two ranks called different collectives: both ranks, both calls
    │   └── SaveError        a checkpoint was not saved: of which step, and why
    └── ScheduleError        a collective algorithm is wrong: which rank, which block, what it holds

A bug in MiMatrix is an assertion, not an error of this tree.
"""

from collections.abc import Iterable
from difflib import get_close_matches

# A cluster knows thousands of names, and an error is one sentence.
_SHOWN = 20


class MiMatrixError(Exception):
    """The base of all errors that MiMatrix raises on purpose."""


class UserError(MiMatrixError):
    """Bad input: the message is one sentence that ends with the fix."""


class ConfigError(UserError):
    """Bad input in a file; the message starts with the file and the line."""


class UnsuitedError(UserError):
    """An algorithm that cannot do what is asked, where another one can: a caller that tries several continues."""


class DifferentCalls(UserError):  # noqa: N818 (it names what ranks do)
    """Ranks make different calls of the user's script and wait for each other; the message has their lines already."""


class WorldError(MiMatrixError):
    """Something outside the program failed, such as a peer, a disk or a network; the input is not to blame."""


class PeerLost(WorldError):  # noqa: N818 (the name that the design gives it)
    """A peer is gone or silent. The message names its rank, its host, the collective and since when.

    Attributes:
        rank: The rank of the peer.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class MismatchError(WorldError):
    """Ranks called different collectives, or the same one with different shapes or types."""


class SaveError(WorldError):
    """A checkpoint could not be written; the message has its step and the reason."""


class ScheduleError(MiMatrixError):
    """A schedule does not do what its collective promises, or two ranks race in it."""


def close_match(word: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `word` is most likely a misspelling of, or None if none is close."""
    choices = {choice.lower(): choice for choice in sorted(known)}
    close = get_close_matches(word.lower(), choices, n=1, cutoff=0.6)
    return choices[close[0]] if close else None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for a close match of `word`, otherwise what is known, cut where that is long."""
    choices = list({choice.lower(): choice for choice in sorted(known)}.values())
    if close := close_match(word, choices):
        return f'; did you mean "{close}"?'
    more = f" and {len(choices) - _SHOWN} more" if len(choices) > _SHOWN else ""
    return f"; known are {', '.join(choices[:_SHOWN])}{more}"
