"""Quantities out and in again, and everything that is not one."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.core.errors import UserError
from mimatrix.core.units import (
    format_bytes,
    format_decimal_bytes,
    format_duration,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_duration,
    parse_rate,
    parse_seconds,
)

# Three digits are printed, or whole numbers from 100 up: the last digit is off by half, of at least 100.
PRINTED = 0.00501
PARSERS = [parse_bytes, parse_rate, parse_seconds, parse_duration]
NONSENSE = [
    "",
    " ",
    "fast",
    "Gbit",
    "us",
    "nan",
    "inf",
    "-inf",
    "nanGbit",
    "infs",
    "1,5GB",
    "1 000GB",
    "1_000GB",
    "0x10GB",
    "1..5GB",
    "1e",
    "1e5e5s",
    "--1s",
    "5 5us",
    "3us3us",
    "10GB; rm",
    "½GB",
    "²s",
    "∞",
    "十GB",
    "10💾",
    "5XB",
    "5iB",
    "5iGB",
    "5KKB",
    "\x00",
]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("1byte", 1),
        ("2 bytes", 2),
        ("1k", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1ki", 1024),
        ("64MiB", 64 << 20),
        ("64mib", 64 << 20),
        (" 80GB\n", 80 * 10**9),
        ("1.5GiB", 3 << 29),
        ("1.GB", 10**9),
        ("2TiB", 2 << 40),
        ("+3TB", 3 * 10**12),
        ("1e3MB", 10**9),
        ("5e-1KB", 500),
    ],
)
def test_sizes(text: str, count: int) -> None:
    found = parse_bytes(text)
    assert found == count
    assert type(found) is int


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("8bit", 1.0),
        ("8bit/s", 1.0),
        ("25Gbit", 25e9 / 8),
        ("25gbit", 25e9 / 8),
        ("25 Gbit/s", 25e9 / 8),
        ("25Gbits", 25e9 / 8),
        ("25Gbps", 25e9 / 8),
        ("25gbps", 25e9 / 8),
        ("25GBps", 25e9),
        ("16GB", 16e9),
        ("16GB/s", 16e9),
        ("16Gbytes/s", 16e9),
        ("1Gibit", 2**30 / 8),
        ("1GiB", 2.0**30),
        ("0.5bit", 1 / 16),
    ],
)
def test_rates_in_bits_and_in_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0.0),
        ("-0s", 0.0),
        ("3us", 3e-6),
        ("3 US", 3e-6),
        ("3\N{MICRO SIGN}s", 3e-6),
        ("3\N{GREEK SMALL LETTER MU}s", 3e-6),
        ("1.5ms", 1.5e-3),
        ("2s", 2.0),
        ("7ns", 7e-9),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("1e-7s", 1e-7),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15, abs=0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        (" 1.5\n", 1.5),
        ("90s", 90.0),
        ("2m", 120.0),
        ("2 min", 120.0),
        ("1h30m", 5400.0),
        ("1h 30m 5s", 5405.0),
        ("1H", 3600.0),
        ("2d", 172_800.0),
        ("1d12h", 129_600.0),
        ("0.5h", 1800.0),
        ("100ms", 0.1),
        ("1e3s", 1000.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12, abs=0)


@pytest.mark.parametrize("text", ["1h30", "30m1h", "1h1h", "2m3min", "-5", "-5s", "1h-30m", "5w", "h", "1h30x", "1:30"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(UserError, match="is not a time; write for example 90s, 2m, 1h30m or 2d"):
        parse_duration(text)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_with_an_example(parser: Callable[[str], float], text: str) -> None:
    with pytest.raises(UserError, match=r"write for example \d") as refused:
        parser(text)
    assert f'"{text}"' in str(refused.value)


@pytest.mark.parametrize("text", ["25Gbpsps", "25Gbps/s", "25G", "25", "25us", "1e3", "25Gbit/h", "25bit per s"])
def test_what_is_not_a_rate(text: str) -> None:
    with pytest.raises(UserError, match="is not a rate; write for example 25Gbit or 16GB"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "fix"), [("16Gb", "16Gbit or 16GB"), ("1.5kb/s", "1.5kbit or 1.5kB"), ("8 b", "8bit or 8B")]
)
def test_a_small_b_is_asked_about(text: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"could be bits or bytes; write {fix}"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["25", "0", "3GB", "3bit", "3 u s", "3Ms3", "3\N{LATIN SMALL LETTER LONG S}", "3d"])
def test_what_is_not_a_time(text: str) -> None:
    with pytest.raises(UserError, match=r"is not a time; write for example 3us, 1\.5ms or 2s"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["3us", "3bit", "3bps", "3GB/s", "3ms", "3Mbyt"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UserError, match="is not a size; write for example 64MiB, 80GB or 4096"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["-1", "-80GB", "-1e400GB", "-5e-1KB"])
def test_sizes_below_zero(text: str) -> None:
    with pytest.raises(UserError, match="a size must not be negative, got") as refused:
        parse_bytes(text)
    assert f'"{text}"' in str(refused.value)


@pytest.mark.parametrize("text", ["0bit", "0.0GB", "-0bit", "-1Gbit", "-1e400bit", "1e-400bit"])
def test_rates_of_zero_and_below(text: str) -> None:
    with pytest.raises(UserError, match="a rate must be above zero, got"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["-1us", "-1e-9s", "-1e400s"])
def test_times_below_zero(text: str) -> None:
    with pytest.raises(UserError, match="a time must not be negative, got"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parse_bytes, "1e400"),
        (parse_bytes, "1e308TB"),
        (parse_bytes, "9" * 5000),
        (parse_rate, "1e400bit"),
        (parse_rate, "1e308GB"),
        (parse_seconds, "1e400s"),
        (parse_seconds, "1e308h"),
        (parse_duration, "1e400"),
        (parse_duration, "1e308d"),
    ],
)
def test_more_than_a_float_holds(parser: Callable[[str], float], text: str) -> None:
    with pytest.raises(UserError, match="is not a finite number; write a smaller one"):
        parser(text)


def value_or_sentence(parser: Callable[[str], float], text: str) -> float | str:
    try:
        return parser(text)
    except UserError as error:
        return str(error)


NEARLY = st.from_regex(r"[+-]?[0-9]{1,9}(\.[0-9]{0,3})?(e[+-]?[0-9]{1,3})? ?[a-zA-Zµ/]{0,6}", fullmatch=True)


@settings(deadline=None)
@given(st.text() | NEARLY)
def test_any_text_gives_a_number_or_a_sentence(text: str) -> None:
    for parser, least in ((parse_bytes, 0.0), (parse_rate, 5e-324), (parse_seconds, 0.0), (parse_duration, 0.0)):
        found = value_or_sentence(parser, text)
        if isinstance(found, str):
            assert f'"{text}"' in found
            assert "; write " in found
        else:
            assert least <= found < math.inf


@settings(deadline=None)
@given(st.integers(0, 10**18))
def test_sizes_printed_and_read(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=PRINTED, abs=0.5)


@settings(deadline=None)
@given(st.integers(1, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_even_sizes_are_printed_exactly(count: int, unit: str) -> None:
    text = f"{count}{unit}"
    assert format_bytes(parse_bytes(text)) == text


@settings(deadline=None)
@given(st.floats(1e-9, 1e18))
def test_rates_printed_and_read(bytes_per_s: float) -> None:
    assert parse_rate(format_rate(bytes_per_s)) == pytest.approx(bytes_per_s, rel=PRINTED, abs=0)


@settings(deadline=None)
@given(st.just(0.0) | st.floats(1e-15, 1e9))
def test_times_printed_and_read(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=PRINTED, abs=0)


@settings(deadline=None)
@given(st.floats(1e-9, 999.0), st.floats(0.125, 1e14))
def test_the_unit_fits(seconds: float, bytes_per_s: float) -> None:
    for text in (format_seconds(seconds), format_rate(bytes_per_s)):
        assert 1 <= float(text.rstrip("numsbitkMGT")) <= 1000


@pytest.mark.parametrize("show", [format_bytes, format_rate, format_seconds])
def test_what_is_not_a_number_shows(show: Callable[[float], str]) -> None:
    assert show(math.nan).startswith("nan")


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (format_bytes(0), "0B"),
        (format_bytes(1023), "1.02kB"),
        (format_bytes(1024), "1KiB"),
        (format_bytes(1.5e9), "1.5GB"),
        (format_bytes(64 << 20), "64MiB"),
        (format_bytes(1536 << 20), "1536MiB"),
        (format_bytes(131_923_456 << 10), "126GiB"),
        (format_bytes(-(131_923_456 << 10)), "-126GiB"),
        (format_bytes(15_830 << 20), "15.5GiB"),
        (format_bytes(-(64 << 20)), "-64MiB"),
        (format_bytes(-1.5e9), "-1.5GB"),
        (format_rate(25e9 / 8), "25Gbit"),
        (format_rate(-25e9 / 8), "-25Gbit"),
        (format_rate(0.0), "0bit"),
        (format_rate(math.inf), "unlimited"),
        (format_seconds(0.0), "0ns"),
        (format_seconds(12.34e-6), "12.3us"),
        (format_seconds(4.56e-3), "4.56ms"),
        (format_seconds(-4.56e-3), "-4.56ms"),
        (format_seconds(123.4), "123s"),
        (format_seconds(5e-10), "0.5ns"),
    ],
)
def test_printed(found: str, wanted: str) -> None:
    assert found == wanted


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.5, "500ms"),
        (90.0, "90s"),
        (180.0, "3min"),
        (38_915.0, "10.8h"),
        (7200.0, "2h"),
        (302_400.0, "3.5d"),
    ],
)
def test_durations_are_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert parse_duration(text) == pytest.approx(seconds, rel=PRINTED)


def test_decimal_sizes_can_be_compared() -> None:
    assert [format_decimal_bytes(size) for size in (1 << 20, 24e9, 512)] == ["1.05MB", "24GB", "512B"]
