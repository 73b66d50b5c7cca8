"""Quantities as people write them (`25Gbit`, `3us`, `80GB`, `64MiB`) and as numbers: bytes, seconds, bytes a second."""

import math
import re

from mimatrix.core.errors import UserError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_PREFIX = _DECIMAL | _BINARY
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_DURATIONS = _SECONDS | {"m": 60.0, "d": 86_400.0}
_BINARY_UNITS = (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))
_MANY = 10_000
"""More digits than people read: a larger unit says enough."""

_NUMBER = r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
_BYTES_TEXT = re.compile(_NUMBER + r"\s*(?P<prefix>[kmgt]?i?)(?:b|bytes?)?", re.IGNORECASE)
_RATE_TEXT = re.compile(_NUMBER + r"\s*(?P<prefix>[kmgt]?i?)(?P<unit>bits?|bytes?|b)(?P<per>/s|ps)?", re.IGNORECASE)
_TIME_TEXT = re.compile(_NUMBER + r"\s*(?P<unit>[a-zµμ]+)", re.IGNORECASE)
_DURATION_PART = re.compile(_NUMBER.replace("[+-]?", "", 1) + r"\s*(?P<unit>[a-zµμ]+)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`64MiB`, `80GB`, `1024` as a number of bytes."""
    found = _BYTES_TEXT.fullmatch(text.strip())
    if not found or found["prefix"].lower() not in _PREFIX:
        raise UserError(f'"{text}" is not a size; write for example 64MiB, 80GB or 4096')
    size = float(found["number"]) * _PREFIX[found["prefix"].lower()]
    if size < 0:
        raise UserError(f'a size must not be negative, got "{text}"; write for example 64MiB')
    return round(_finite(text, size))


def parse_rate(text: str) -> float:
    """`25Gbit` or `16GB` (per second, with or without `/s`) as bytes per second. `25Gbps` is bits."""
    found = _RATE_TEXT.fullmatch(text.strip())
    if not found or found["prefix"].lower() not in _PREFIX:
        raise UserError(f'"{text}" is not a rate; write for example 25Gbit or 16GB (per second)')
    if found["unit"] == "b" and found["per"] != "ps":
        number = f"{found['number']}{found['prefix']}"
        raise UserError(f'"{text}" could be bits or bytes; write {number}bit or {number}B')
    in_bits = found["unit"].lower().startswith("bit") or found["unit"] == "b"
    rate = float(found["number"]) * _PREFIX[found["prefix"].lower()] / (8 if in_bits else 1)
    if rate <= 0:
        raise UserError(f'a rate must be above zero, got "{text}"; write for example 25Gbit')
    return _finite(text, rate)


def parse_seconds(text: str) -> float:
    """`3us`, `1.5ms`, `2s` as seconds."""
    found = _TIME_TEXT.fullmatch(text.strip())
    if not found or found["unit"].lower() not in _SECONDS:
        raise UserError(f'"{text}" is not a time; write for example 3us, 1.5ms or 2s')
    seconds = float(found["number"]) * _SECONDS[found["unit"].lower()]
    if seconds < 0:
        raise UserError(f'a time must not be negative, got "{text}"; write for example 3us')
    return _finite(text, seconds)


def parse_duration(text: str) -> float:
    """`90s`, `2m`, `1h30m`, `2d` as seconds: how long something may take. A bare number is seconds."""
    said = text.strip()
    said = f"{said}s" if re.fullmatch(_NUMBER, said, re.IGNORECASE) else said
    found = list(_DURATION_PART.finditer(said))
    units = [_DURATIONS.get(part["unit"].lower(), 0.0) for part in found]
    is_whole = "".join(part[0] for part in found) == said
    # From the largest unit to the smallest, each once: whoever writes 30m1h may have meant something else.
    if not found or not is_whole or 0.0 in units or units != sorted({*units}, reverse=True):
        raise UserError(f'"{text}" is not a time; write for example 90s, 2m, 1h30m or 2d')
    return _finite(text, sum(float(part["number"]) * unit for part, unit in zip(found, units, strict=True)))


def format_bytes(count: float) -> str:
    """Binary where it comes out even (`64MiB`), in a larger unit where that is long (`126GiB`), else decimal."""
    even = [(prefix, scale) for prefix, scale in _BINARY_UNITS if abs(count) >= scale and count % scale == 0]
    for prefix, scale in even[:1]:
        if abs(count) < _MANY * scale:
            return f"{int(count // scale)}{prefix}B"
        return next(f"{_short(count / large)}{name}B" for name, large in _BINARY_UNITS if abs(count) >= large)
    return _scaled(count, "B")


def format_decimal_bytes(count: float) -> str:
    """Return a size in decimal units, so that sizes below one another can be compared: `24GB`, `1.5MB`."""
    return _scaled(count, "B")


def format_rate(bytes_per_second: float) -> str:
    """Links speak bits: `25Gbit`."""
    return "unlimited" if math.isinf(bytes_per_second) else _scaled(bytes_per_second * 8, "bit")


def format_seconds(seconds: float) -> str:
    """Three digits and the unit that fits: `12.3us`, `4.56ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_short(seconds / scale)}{unit}"
    return f"{_short(seconds / 1e-9)}ns"


def format_duration(seconds: float) -> str:
    """Return how long people wait, in the unit that fits: `12.3s`, `45min`, `10.8h`, `3.5d`."""
    for unit, scale in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * scale:
            return f"{_short(seconds / scale)}{unit}"
    return format_seconds(seconds) if seconds else "0s"


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(value) >= scale:
            return f"{_short(value / scale)}{prefix}{unit}"
    return f"{_short(value)}{unit}"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _finite(text: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f'"{text}" is not a finite number; write a smaller one')
    return value
