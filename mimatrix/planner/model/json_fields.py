"""Read fields of JSON that people may have edited: each is read as a type, and named in the error if it is not that."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BEYOND = 1e18
"""All figures are below this, and NaN is not."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a file. A field of another type raises a ValueError with its place and what was wanted."""

    values: Mapping[str, Any]
    where: str = ""
    """Its place in the file, as a prefix of names: `profiles[0].`."""

    @classmethod
    def read(cls, text: str) -> "Fields":
        """Parse an object from JSON."""
        try:
            return cls.of(json.loads(text), "it")
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    @classmethod
    def of(cls, value: object, place: str) -> "Fields":
        """Wrap a value that must be an object."""
        if not isinstance(value, Mapping):
            raise _mismatch(place, value, "an object in braces")
        return cls(value, "" if place == "it" else f"{place}.")

    def take(self, name: str) -> Any:
        """Return a field of any type, which must exist."""
        if name not in self.values:
            raise ValueError(f"{self.where}{name} is missing")
        return self.values[name]

    def text(self, name: str) -> str:
        """Return a text, which may be empty."""
        return _text(self.take(name), self.where + name)

    def label(self, name: str) -> str:
        """Return a text that is not blank."""
        found = self.text(name)
        if not found.strip():
            raise _mismatch(self.where + name, found, "a name")
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        found = self.take(name)
        if not isinstance(found, bool):
            raise _mismatch(self.where + name, found, "true or false")
        return found

    def whole(self, name: str, least: int = 0, most: int | None = None) -> int:
        """Return a whole number."""
        found = _whole(self.take(name), self.where + name, least)
        if most is not None and found > most:
            raise _mismatch(self.where + name, found, f"{least} to {most}")
        return found

    def figure(self, name: str, least: float = 0.0) -> float:
        """Return a number."""
        return _figure(self.take(name), self.where + name, least)

    def size(self, name: str) -> int:
        """Return bytes, or another large count, which may be written as `24e9`."""
        return int(self.figure(name))

    def entries(self, name: str) -> list[tuple[str, Any]]:
        """Return the entries of a list, each with its place."""
        place = self.where + name
        return [(f"{place}[{index}]", each) for index, each in enumerate(_list(self.take(name), place))]

    def objects(self, name: str) -> "tuple[Fields, ...]":
        """Return a list of objects."""
        return tuple(Fields.of(each, place) for place, each in self.entries(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        return tuple(_text(each, place) for place, each in self.entries(name))

    def figures(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers."""
        found = self.entries(name)
        if len(found) != count:
            raise ValueError(f"{self.where}{name} has {len(found)} entries, wanted {count}")
        return tuple(_figure(each, place) for place, each in found)

    def wholes(self, name: str, least: int = 0) -> tuple[tuple[int, ...], ...]:
        """Return a list of lists of whole numbers."""
        return tuple(
            tuple(_whole(number, place, least) for number in _list(each, place)) for place, each in self.entries(name)
        )

    def points(self, name: str, least: float = 0.0) -> list[tuple[int, float]]:
        """Return pairs of a batch size, each once, and a number."""
        found = {}
        for place, each in self.entries(name):
            if len(_list(each, place)) != 2:
                raise _mismatch(place, each, "a batch size and a number")
            size = _whole(each[0], place, 1)
            if size in found:
                raise ValueError(f"{place} has the batch size {size} again")
            found[size] = _figure(each[1], place, least)
        if not found:
            raise ValueError(f"{self.where}{name} is empty")
        return sorted(found.items())


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise _mismatch(place, value, "text")
    return value


def _whole(value: object, place: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _BEYOND:
        raise _mismatch(place, value, f"a whole number from {least}")
    return value


def _figure(value: object, place: str, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < _BEYOND:
        raise _mismatch(place, value, f"a number from {least:g}")
    return float(value)


def _list(value: object, place: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _mismatch(place, value, "a list")
    return value


def _mismatch(place: str, value: object, wanted: str) -> ValueError:
    try:
        shown = json.dumps(value, default=str)
    except RecursionError:
        shown = "nested too deeply"
    return ValueError(f"{place} is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + ' ...'}, wanted {wanted}")
