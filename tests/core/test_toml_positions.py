"""Lines of keys, against values of `tomllib` and against texts whose lines are known as they are written."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.core.toml_positions import Path, find_places

TRAPS = r'''# rate = "in a comment"
name = "rate = 1" # rate = 2
"quoted key" = 1
'literal = key' = 2
"esc\u0061ped\"" = 3
a.b . "c.d" = 4
long = """
rate = 5
[node]
# " a quote in it, and \""" some more""""
raw = @@@
[[link]]
rate = 6@@@@@
numbers = [
  1.5, # ] = [
  [2, 3],
  "]", { x = 1, y.z = [4] },
]
when = 1979-05-27 07:32:00
  [ node . "bus.x" ]  # [[node]]
rate = 7
[[link]] # first
rate = 8
[link.inner]
deep = 9
[[link.more]]
m = 10
[[link.more]]
m = 11
[['link']]
rate = 12
more = []
[link.inner]
deep = 13
'''.replace("@", "'")


def test_every_trap() -> None:
    places = find_places(TRAPS)
    lines = TRAPS.split("\n")
    wanted = {
        ("name",): "name = ",
        ("quoted key",): '"quoted key"',
        ("literal = key",): "'literal",
        ('escaped"',): '"esc',
        ("a",): "a.b",
        ("a", "b", "c.d"): "a.b",
        ("long",): "long",
        ("raw",): "raw",
        ("numbers", 0): "  1.5",
        ("numbers", 1): "  [2",
        ("numbers", 1, 1): "  [2",
        ("numbers", 3, "y", "z", 0): '  "]"',
        ("when",): "when",
        ("node",): "  [ node",
        ("node", "bus.x", "rate"): "rate = 7",
        ("link", 0): "[[link]] # first",
        ("link", 0, "rate"): "rate = 8",
        ("link", 0, "inner", "deep"): "deep = 9",
        ("link", 0, "more", 0, "m"): "m = 10",
        ("link", 0, "more", 1, "m"): "m = 11",
        ("link", 1): "[['link']]",
        ("link", 1, "rate"): "rate = 12",
        ("link", 1, "inner"): "[link.inner]",
        ("link", 1, "inner", "deep"): "deep = 13",
    }
    for path, start in wanted.items():
        assert lines[places[path] - 1].startswith(start), path
    assert places[("link", 1, "inner")] > places[("link", 1, "rate")]


def paths_of(value: object, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths_of(inner, (*path, index))


def test_the_places_are_those_of_the_values() -> None:
    assert set(find_places(TRAPS)) == set(paths_of(tomllib.loads(TRAPS)))


def test_ends_of_lines() -> None:
    """Only a line feed ends a line, as for the editor and for `tomllib`: not what `str.splitlines` takes for one."""
    assert find_places("a = 1\r\nb = 2\r\n")[("b",)] == 2
    assert find_places("a = '\u2028\x85' # \u2029\nb = 2")[("b",)] == 2
    assert find_places("") == {}
    assert find_places("\n\n# nothing") == {}


@dataclass
class Writer:
    """Writes TOML and notes the line of each key while it does so."""

    text: str = ""
    places: dict[Path, int] = field(default_factory=dict)

    def note(self, path: Path) -> None:
        self.places.setdefault(path, self.text.count("\n") + 1)

    def pair(self, path: Path, key: str, value: object, draw: st.DrawFn) -> None:
        self.note((*path, key))
        self.text += f"{quoted(key)} = "
        self.value((*path, key), value, draw)

    def value(self, path: Path, value: object, draw: st.DrawFn) -> None:
        if isinstance(value, dict):
            self.text += "{"
            for index, (key, inner) in enumerate(value.items()):
                self.text += ", " if index else " "
                self.pair(path, key, inner, draw)
            self.text += " }"
        elif isinstance(value, list):
            self.text += "["
            for index, inner in enumerate(value):
                self.text += draw(st.sampled_from(["", "\n", " # a = [\n\n"]))
                self.note((*path, index))
                self.value((*path, index), inner, draw)
                self.text += ","
            self.text += "]"
        elif isinstance(value, str) and draw(st.booleans()):
            # A long string in which the text stands as it is, line ends included.
            self.text += '"""\n' + value.replace("\\", "\\\\").replace('"', '\\"') + '"""'
        else:
            self.text += quoted(value) if isinstance(value, str) else str(value)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\u{ord(char):04x}" if char in '"\\\n' else char for char in text) + '"'


WORDS = st.text("ab=[]{}#.,'\"\\\n \u2028", max_size=6)
VALUES = st.recursive(
    WORDS | st.integers(0, 99) | st.floats(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def texts(draw: st.DrawFn) -> Writer:
    writer = Writer()
    tables = draw(st.lists(st.dictionaries(WORDS, VALUES, max_size=3), min_size=1, max_size=4))
    for number, table in enumerate(tables):
        path: Path = ()
        if number:
            path = ("many", number - 1)
            writer.note(("many",))
            writer.note(path)
            writer.text += "[[many]]\n"
        for key, value in table.items():
            writer.pair(path, key, value, draw)
            writer.text += draw(st.sampled_from(["\n", " # b = 1\n", "\n\n"]))
    return writer


@settings(deadline=None)
@given(texts())
def test_random_texts(writer: Writer) -> None:
    assert set(writer.places) == set(paths_of(tomllib.loads(writer.text)))
    assert find_places(writer.text) == writer.places
