"""Lists, counts, bytes and seconds as they are written in sentences: `a, b and c`, `3 ranks`, `120 MB`, `212 ms`."""

from collections.abc import Sequence

from mimatrix.core.units import format_decimal_bytes, format_seconds


def join_names(names: Sequence[str], limit: int = 3) -> str:
    """Return `a, b and c`; of more than `limit` + 1 names the first `limit`, and how many more there are."""
    if len(names) > limit + 1:
        names = [*names[:limit], f"{len(names) - limit} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: `1 rank`, `3 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ordinal(number: int) -> str:
    """Return `1st`, `2nd`, `3rd`, `4th`, `11th`, `22nd`."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else endings.get(number % 10, 'th')}"


def spell_bytes(count: float) -> str:
    """Return a size with three digits: `120 MB`, `1.5 GB`, `512 bytes`."""
    return _spaced(format_decimal_bytes(count)) if count >= 1000 else f"{count:.0f} bytes"


def spell_seconds(seconds: float) -> str:
    """Return a time with three digits: `212 ms`, `1.5 s`."""
    return _spaced(format_seconds(seconds))


def _spaced(quantity: str) -> str:
    """Put a space between a number and its unit."""
    unit = quantity.lstrip("-.0123456789")
    return f"{quantity.removesuffix(unit)} {unit}"
