"""Tables read with every mistake a person makes in a file; each must be told with its line, its key and the fix."""

import re
from collections.abc import Callable

import pytest

from mimatrix.core.config import Table, read_table
from mimatrix.core.errors import ConfigError
from mimatrix.core.units import parse_rate

GOOD = """\
name = "lab"
count = 3
loud = true

[[link]]
rate = "25Gbit"
ends = [{ at = "a" }, { at = "b" }]

[[link]]
ends = [
  { at = "a" },
  { at = "b" },
]
bus = { rate = "16GB" }
"""


def read(text: str) -> list[tuple[float | None, float | None, list[str]]]:
    """Read as the code does: take what is known and close every table."""
    root = read_table("lab.toml", text)
    root.take("name", str)
    root.take("count", int, 1)
    root.take("loud", bool, False)
    links = [read_link(table) for table in root.tables("link")]
    root.close()
    return links


def read_link(table: Table) -> tuple[float | None, float | None, list[str]]:
    rate = table.parse("rate", parse_rate, None)
    ends = [read_end(end) for end in table.inline("ends")]
    bus = table.inner("bus")
    bus_rate = None
    if bus:
        bus_rate = bus.parse("rate", parse_rate)
        bus.close()
    table.close()
    return rate, bus_rate, ends


def read_end(end: Table) -> str:
    at = end.take("at", str)
    end.close()
    return at


def refused(text: str, reader: Callable[[str], object] = read) -> str:
    with pytest.raises(ConfigError) as caught:
        reader(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_right_is_read() -> None:
    assert read(GOOD) == [(25e9 / 8, None, ["a", "b"]), (None, 16e9, ["a", "b"])]


def test_the_default_is_taken_as_it_is() -> None:
    root = read_table("x.toml", "")
    marker = object()
    assert root.take("count", int, marker) is marker
    assert root.parse("rate", parse_rate, marker) is marker
    assert root.tables("link") == []
    assert root.inner("bus") is None
    root.close()


UNKNOWN = [
    # text, line, key, place, the offer
    ('name = "x"\nnmae = "y"\n', 2, "nmae", "", 'did you mean "name"?'),
    ('name = "x"\nCount = 2\n', 2, "Count", "", 'did you mean "count"?'),
    ('name = "x"\n"cuont" = 2\n', 2, "cuont", "", 'did you mean "count"?'),
    ("name = 'x'\n'cuont' = 2\n", 2, "cuont", "", 'did you mean "count"?'),
    ('name = "x"\n"" = 2\n', 2, "", "", "known are count, link, loud, name"),
    ('name = "x"\nzebra = 2\n', 2, "zebra", "", "known are count, link, loud, name"),
    ('name = "x"\n\n\n[[links]]\nrate = "1Gbit"\n', 4, "links", "", 'did you mean "link"?'),
    ('name = "x"\n\n[nmae]\na = 1\n', 3, "nmae", "", 'did you mean "name"?'),
    ('name = "x"\nlink.inner.deep = 3\n', 2, "link", "", "wanted tables; write [[link]] and its keys below"),
    ('name = "x"\nlonk.inner = 3\n', 2, "lonk", "", 'did you mean "link"?'),
    ('name = "x"\n[[link]]\nends = []\nraet = "1"\n', 4, "raet", " in [[link]] number 1", 'did you mean "rate"?'),
    (
        'name = "x"\n[[link]]\nends = []\n[[link]]\nends = []\nrat = "1"\n',
        6,
        "rat",
        " in [[link]] number 2",
        'did you mean "rate"?',
    ),
    # The same wrong key stands in a comment, in a text and in a long text first.
    (
        'name = "raet = 1" # raet = 2\n# raet = 3\n[[link]]\n# raet = 4\nends = []\nraet = 5\n',
        6,
        "raet",
        " in [[link]] number 1",
        'did you mean "rate"?',
    ),
    ('name = """\nconut = 1\n[[link]]\nconut = 2\n"""\nconut = 3\n', 6, "conut", "", 'did you mean "count"?'),
    # Inside inline tables: in the second of one line, in the second of several lines.
    (
        'name = "x"\n[[link]]\nends = [{ at = "a" }, { at = "b", att = 1 }]\n',
        3,
        "att",
        " in [[link]] number 1",
        'did you mean "at"?',
    ),
    (
        'name = "x"\n[[link]]\nends = [\n  { at = "a" },\n  { at = "b", att = 1 },\n]\n',
        5,
        "att",
        " in [[link]] number 1",
        'did you mean "at"?',
    ),
    (
        'name = "x"\n[[link]]\nrate = "1Gbit"\nends = []\nbus = { rate = "1GB", rat = 1 }\n',
        5,
        "rat",
        " in [[link]] number 1",
        'did you mean "rate"?',
    ),
    # A table of its own, and a dotted key, instead of an inline table.
    (
        'name = "x"\n[[link]]\nends = []\n[link.bus]\nrate = "1GB"\nlag = 1\n',
        6,
        "lag",
        " in [[link]] number 1",
        "known are rate",
    ),
    (
        'name = "x"\n[[link]]\nends = []\nbus.rate = "1GB"\nbus.lag = 1\n',
        5,
        "lag",
        " in [[link]] number 1",
        "known are rate",
    ),
    ('name = "x"\n[[link]]\n[[link.ends]]\nat = "a"\n[[link.ends]]\natt = 1\nat = "b"\n', 6, "att", None, '"at"?'),
    # Spaces, quotes and comments on the head of the table.
    ('name = "x"\n [[ "link" ]] # [[link]]\nends = []\nraet = 1\n', 4, "raet", " in [[link]] number 1", '"rate"?'),
    ("name = 'x'\r\n\r\nconut = 1\r\n", 3, "conut", "", '"count"?'),
]


@pytest.mark.parametrize(("text", "line", "key", "place", "offer"), UNKNOWN)
def test_unknown_keys(text: str, line: int, key: str, place: str | None, offer: str) -> None:
    said = refused(text)
    place = " in [[link]] number 1" if place is None else place
    assert said.startswith(f'lab.toml line {line}, key "{key}"{place}: ')
    assert said.endswith(offer)


def test_missing_at_the_root() -> None:
    assert refused("# nothing\n\ncount = 1") == 'lab.toml line 1, key "name": missing; add a line name = ...'
    assert refused("").startswith('lab.toml line 1, key "name": missing; ')


def test_missing_but_misspelt() -> None:
    said = refused('# name = "x"\nNmae = "x"\n')
    assert said == 'lab.toml line 1, key "name": missing; add a line name = ... (is "Nmae" misspelt?)'


def test_missing_in_a_table_names_its_head() -> None:
    text = 'name = "x"\n[[link]]\nends = []\n\n[[link]] # ends = []\nrate = "1Gbit"\n[[link]]\nends = []\n'
    assert refused(text) == 'lab.toml line 5, key "ends" in [[link]] number 2: missing; add a line ends = ...'


def test_missing_in_an_inline_table_names_its_own_line() -> None:
    text = 'name = "x"\n[[link]]\nends = [\n  { at = "a" },\n  {},\n]\n'
    assert refused(text).startswith('lab.toml line 5, key "at" in [[link]] number 1: missing; ')
    text = 'name = "x"\n[[link]]\nrate = "1Gbit"\nends = []\nbus = {}\n'
    assert refused(text).startswith('lab.toml line 5, key "rate" in [[link]] number 1: missing; ')
    text = 'name = "x"\n[[link]]\nrate = "1Gbit"\nends = []\n\n[link.bus]\n'
    assert refused(text).startswith('lab.toml line 6, key "rate" in [[link]] number 1: missing; ')


WRONG = [
    ("name = 3", 1, "name", "wanted a text, got 3; write it in quotes"),
    ('name = "x"\ncount = "3"', 2, "count", "wanted a whole number, got '3'; write for example 4"),
    ('name = "x"\ncount = 3.0', 2, "count", "wanted a whole number, got 3.0; write for example 4"),
    ('name = "x"\ncount = true', 2, "count", "wanted a whole number, got True; write for example 4"),
    ('name = "x"\ncount = nan', 2, "count", "wanted a whole number, got nan; write for example 4"),
    ('name = "x"\nloud = 1', 2, "loud", "wanted true or false, got 1; write true"),
    ('name = "x"\nloud = "true"', 2, "loud", "wanted true or false, got 'true'; write true"),
    ('name = "x"\n\n[count]\na = 1', 3, "count", "wanted a whole number, got {'a': 1}; write for example 4"),
    ('name = "x"\n\n[link]\nrate = "1Gbit"', 3, "link", "wanted tables; write [[link]] and its keys below"),
    ('name = "x"\nlink = "a"', 2, "link", "wanted tables; write [[link]] and its keys below"),
    ('name = "x"\nlink = [{ ends = [] }, 3]', 2, "link", "wanted tables; write [[link]] and its keys below"),
]
WRONG_INSIDE = [
    ("rate = 25", 3, "rate", "wanted a text, got 25; write it in quotes"),
    ('ends = "a"', 3, "ends", "wanted a list, got 'a'; write [...]"),
    ('ends = ["a", "b"]', 3, "ends", "wanted inline tables; write ends = [{"),
    ("ends = [\n  { at = 1 },\n]", 4, "at", "wanted a text, got 1; write it in quotes"),
    ('ends = []\nbus = "fast"', 4, "bus", "wanted a table, got 'fast'; write {...}"),
    ("ends = []\nbus = [{}]", 4, "bus", "wanted a table, got [{}]; write {...}"),
    ("ends = []\nbus = { rate = 1979-05-27 }", 4, "rate", "wanted a text, got datetime.date(1979, 5, 27)"),
    (
        'rate = "fast"\nends = []',
        3,
        "rate",
        '"fast" is not a rate; write for example 25Gbit or 16GB (per second)',
    ),
    (
        'ends = []\nbus = { rate = "-1GB" }',
        4,
        "rate",
        'a rate must be above zero, got "-1GB"; write for example 25Gbit',
    ),
    # `rate` of the link is right and stands first; the one of the bus is meant.
    ('rate = "1Gbit"\nends = []\nbus = { rate = "" }', 5, "rate", '"" is not a rate; '),
]


@pytest.mark.parametrize(("text", "line", "key", "said"), WRONG)
def test_wrong_types(text: str, line: int, key: str, said: str) -> None:
    assert refused(text) == f'lab.toml line {line}, key "{key}": {said}'


@pytest.mark.parametrize(("text", "line", "key", "said"), WRONG_INSIDE)
def test_wrong_types_inside_a_table(text: str, line: int, key: str, said: str) -> None:
    found = refused(f'name = "x"\n[[link]]\n{text}\n')
    assert found.startswith(f'lab.toml line {line}, key "{key}" in [[link]] number 1: {said}')


def test_a_long_value_is_cut() -> None:
    said = refused(f'name = "x"\ncount = "{"9" * 500}"')
    assert "got '999" in said
    assert "9...; write for example 4" in said
    assert len(said) < 150


def test_the_first_stranger_is_named() -> None:
    assert 'line 2, key "first"' in refused('name = "x"\nfirst = 1\nsecond = 2\n')


def test_a_key_that_looks_like_a_pattern() -> None:
    assert 'line 2, key ".*"' in refused('name = "x"\n".*" = 1\n')


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name", 1),
        ('name = "x', 1),
        ('name = "x"\ncount = \n', 2),
        ('name = "x"\n\nname = "y"\n', 3),
        ('name = "x"\n[[link]\n', 2),
        ("name = 'x'\ncount = 1979-13-45\n", 2),
        ("name = 'x'\n[a]\n[a]\n", 3),
        ("name = 'x'\n\ufeffcount = 2", 2),
        ("name = 'x'\x00", 1),
    ],
)
def test_syntax_errors(text: str, line: int) -> None:
    said = refused(text)
    assert said.startswith("lab.toml is not TOML: ")
    found = re.search(r"at line (\d+), column \d+|at end of document", said)
    assert found, said
    assert found[1] is None or int(found[1]) == line
    assert said.endswith("; see docs/clusters.md for an example")


@pytest.mark.parametrize("text", [f"count = {'9' * 5000}", f"a = {'[' * 5000}{']' * 5000}"])
def test_what_breaks_the_toml_reader(text: str) -> None:
    assert refused(text).startswith("lab.toml is not TOML: ")
