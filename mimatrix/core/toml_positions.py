"""The line on which each key of a TOML text stands, which `tomllib` does not tell."""

import re
import tomllib
from collections.abc import Iterator

Path = tuple[str | int, ...]
"""Where a value is: `("link", 2, "rate")` is the rate of the third `[[link]]`."""

# Strings come first, the long ones before the short ones: whatever they hold, it is no key. A long one may end in up to
# two quotes of its own before the three that close it.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?""""{0,2}|"(?:\\.|[^"\\])*"'''
    r"""|'''.*?''''{0,2}|'[^']*'"""
    r"""|\#[^\n]*|[\[\]{},=.\n]|[^\s\[\]{},=."'\#]+""",
    re.DOTALL,
)


def find_places(text: str) -> dict[Path, int]:
    """Return the line (from 1) of every key, table and list entry of a text that `tomllib` has accepted."""
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.places


class _Scanner:
    """Walks over the text once and notes where keys begin; values are skipped, but for the keys inside them."""

    def __init__(self, text: str) -> None:
        self.places: dict[Path, int] = {}
        self._tokens = [*_tokens(text), ("\n", 0)]
        self._at = 0
        self._entries: dict[Path, int] = {}

    def scan(self) -> None:
        table: Path = ()
        while self._at < len(self._tokens):
            if self._sees("["):
                table = self._head()
            elif not self._passes("\n"):
                self._pair(table)

    def _head(self) -> Path:
        """`[a.b]` or `[[a.b]]`; a key on the way that names several tables means the last of them so far."""
        line, brackets = self._line(), 0
        while self._passes("["):
            brackets += 1
        path: Path = ()
        for key in self._keys():
            path = (*self._latest(path), key)
            self.places.setdefault(path, line)
        if brackets == 2:
            self._entries[path] = self._entries.get(path, 0) + 1
            path = self._latest(path)
            self.places[path] = line
        while self._passes("]"):
            pass
        return path

    def _latest(self, path: Path) -> Path:
        return (*path, self._entries[path] - 1) if path in self._entries else path

    def _pair(self, table: Path) -> None:
        """`key = value`, where a dotted key opens tables by the way."""
        line, path = self._line(), table
        for key in self._keys():
            path = (*path, key)
            self.places.setdefault(path, line)
        self._passes("=")
        self._value(path)

    def _value(self, path: Path) -> None:
        if self._passes("{"):
            while not self._passes("}"):
                if not self._passes(",", "\n"):
                    self._pair(path)
        elif self._passes("["):
            self._items(path)
        else:
            while not self._sees(",", "]", "}", "\n"):
                self._at += 1

    def _items(self, path: Path) -> None:
        index = 0
        while not self._passes("]"):
            if not self._passes(",", "\n"):
                self.places[*path, index] = self._line()
                self._value((*path, index))
                index += 1

    def _keys(self) -> list[str]:
        keys = [self._key()]
        while self._passes("."):
            keys.append(self._key())
        return keys

    def _key(self) -> str:
        token, _ = self._tokens[self._at]
        self._at += 1
        return str(tomllib.loads(f"key = {token}")["key"]) if token[0] in "\"'" else token

    def _line(self) -> int:
        return self._tokens[self._at][1]

    def _sees(self, *tokens: str) -> bool:
        return self._tokens[self._at][0] in tokens

    def _passes(self, *tokens: str) -> bool:
        seen = self._sees(*tokens)
        self._at += seen
        return seen


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Strings, marks, ends of lines and words, each with its line; comments and blanks are left out."""
    line = 1
    for found in _TOKEN.finditer(text):
        if not found[0].startswith("#"):
            yield found[0], line
        line += found[0].count("\n")
