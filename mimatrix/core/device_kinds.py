"""Match a kind of device as people write it (`3090`) with the names of devices (`NVIDIA GeForce RTX 3090`)."""

import re
from collections.abc import Sequence


def match_kind(kind: str, names: Sequence[str]) -> list[str]:
    """Return the `names` that `kind` may mean.

    An equal name wins over one that has `kind` as whole words, that over one whose words all are in `kind`, and that
    over one that contains `kind` anywhere: `A40` is the `NVIDIA A40` and not the `NVIDIA RTX A4000`, while `309` still
    finds the `RTX 3090`. Upper and lower case are the same.
    """
    if not kind:
        return []
    return (
        [name for name in names if name.lower() == kind.lower()]
        or [name for name in names if _has_words(name, kind)]
        or [name for name in names if _has_words(kind, name)]
        or [name for name in names if kind.lower() in name.lower()]
    )


def _has_words(text: str, words: str) -> bool:
    return bool(words and re.search(rf"(?<![^\W_]){re.escape(words)}(?![^\W_])", text, re.IGNORECASE))
