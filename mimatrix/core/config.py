"""Tables of a TOML file, read once at the edge: unknown keys are refused with the nearest match, errors name the line.

A `Table` is one `[[node]]` or `[bus]` together with the place it stands in. Readers take the keys they know and then
call `close`, which refuses whatever was not taken.
"""

import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeVar

from mimatrix.core.errors import ConfigError, UserError, close_match, nearest
from mimatrix.core.toml_positions import Path, find_places

T = TypeVar("T")
_REQUIRED = object()


class Source:
    """The text of one file, able to say on which line a key of a table stands."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text

    def line_of(self, path: Path) -> int:
        """Return the line (from 1) of the key at `path`, or of the table that it is missing from."""
        while path and path not in self._places:
            path = path[:-1]
        return self._places.get(path, 1)

    @cached_property
    def _places(self) -> dict[Path, int]:
        return find_places(self._text)


class Table:
    """One table of a file. Every key must be taken by its reader before `close`."""

    def __init__(self, source: Source, values: Mapping[str, object], path: Path = (), inside: str = "") -> None:
        self._source, self._values, self._path, self._inside = source, values, path, inside
        self._known: list[str] = []

    def fail(self, key: str, sentence: str) -> ConfigError:
        """Return an error at `key`: `cluster.toml line 7, key "rate" in [[link]] number 2: ...`."""
        line = self._source.line_of((*self._path, key))
        return ConfigError(f'{self._source.name} line {line}, key "{key}"{self._inside}: {sentence}')

    def take(self, key: str, kind: type[T], default: object = _REQUIRED) -> T:
        """Return the value of `key`, which must be of `kind`, or `default` if the file does not have it."""
        self._known.append(key)
        if key not in self._values:
            if default is _REQUIRED:
                raise self.fail(key, f"missing; add a line {key} = ...{self._misspelt(key)}")
            return default  # type: ignore[return-value]
        value = self._values[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(key, f"wanted {_WORDS[kind]}, got {_shown(value)}; write {_EXAMPLES[kind]}")
        return value

    def parse(self, key: str, parser: Callable[[str], T], default: object = _REQUIRED) -> T:
        """Return a quantity written as text, such as `rate = "25Gbit"`."""
        text = self.take(key, str, default)
        if key not in self._values:
            return text  # type: ignore[return-value]
        try:
            return parser(text)
        except UserError as error:
            raise self.fail(key, str(error)) from None

    def tables(self, key: str) -> list["Table"]:
        """Return the `[[key]]` tables inside this one, or none."""
        entries = self.take(key, object, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self.fail(key, f"wanted tables; write [[{key}]] and its keys below")
        return [
            Table(self._source, entry, (*self._path, key, index), f" in [[{key}]] number {index + 1}")
            for index, entry in enumerate(entries)
        ]

    def inline(self, key: str) -> list["Table"]:
        """Return a list of inline tables, as in `devices = [{ kind = "A40", memory = "48GB" }]`."""
        entries = self.take(key, list)
        if not all(isinstance(entry, dict) for entry in entries):
            raise self.fail(key, f'wanted inline tables; write {key} = [{{ kind = "A40" }}]')
        return [
            Table(self._source, entry, (*self._path, key, index), self._inside) for index, entry in enumerate(entries)
        ]

    def inner(self, key: str) -> "Table | None":
        """Return the single table under `key`, as in `bus = { rate = "16GB" }`, or None."""
        values = self.take(key, dict, None)
        return None if values is None else Table(self._source, values, (*self._path, key), self._inside)

    def close(self) -> None:
        """Refuse the keys that no reader took."""
        for key in self._values:
            if key not in self._known:
                raise self.fail(key, f"unknown key{nearest(key, self._known)}")

    def _misspelt(self, key: str) -> str:
        strangers = [other for other in self._values if other not in self._known]
        misspelt = next((other for other in strangers if close_match(other, [key])), None)
        return f' (is "{misspelt}" misspelt?)' if misspelt else ""


def read_table(name: str, text: str, page: str = "docs/clusters.md") -> Table:
    """Return the root table of a TOML text; `name` is what errors call the file, and `page` has an example of one."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Not only TOMLDecodeError: numbers of thousands of digits and thousands of brackets fail in their own way.
        raise ConfigError(f"{name} is not TOML: {error}; see {page} for an example") from None
    return Table(Source(name, text), values)


_WORDS = {str: "a text", int: "a whole number", list: "a list", dict: "a table", bool: "true or false"}
_EXAMPLES = {str: "it in quotes", int: "for example 4", list: "[...]", dict: "{...}", bool: "true"}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
