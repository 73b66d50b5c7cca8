"""The base class of all messages, and the field types that they share."""

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from mimatrix.api.text import one_line

_MAX_DEPTH = 12
_MAX_VALUES = 200_000
_MAX_TEXT = 4096
_MAX_NUMBER = 1e18


class ApiModel(BaseModel):
    """A message: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._ -]*$"


def _check_name(name: Any) -> Any:
    """Refuse characters in plain words; length and type are left to the field."""
    if isinstance(name, str) and name and not re.search(_NAME, name):
        raise ValueError("use letters of ASCII, digits, spaces and . _ - only, and begin with a letter or a digit")
    return name


Name = Annotated[str, Field(min_length=1, max_length=100, pattern=_NAME), BeforeValidator(_check_name)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=_MAX_TEXT, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(ge=0, le=1e15)]
"""Bytes or samples per second."""
Mean = Annotated[float, Field(ge=0, le=1e15)]
"""A mean of counts."""
Count = Annotated[int, Field(ge=0, le=1 << 53)]


def _check_names(metrics: dict[str, float | None]) -> dict[str, float | None]:
    """Remove control characters from names; a name that has nothing else is refused."""
    cleaned = {one_line(name): value for name, value in metrics.items()}
    if "" in cleaned:
        raise ValueError("a metric needs a name; give it one that can be printed")
    return cleaned


Metrics = Annotated[
    dict[Annotated[str, Field(max_length=100)], float | None], Field(max_length=32), AfterValidator(_check_names)
]
"""What `run.log` was given, by name. None: not finite."""


def check_document(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON document with control characters removed from its texts.

    Raises:
        ValueError: It is nested too deeply, too large, or has numbers or texts beyond any sensible bound.
    """
    checked = _Document().check(content, 0)
    assert isinstance(checked, dict)
    return checked


Document = Annotated[dict[str, Any], AfterValidator(check_document)]


class _Document:
    """One walk through a document, counting its values."""

    def __init__(self) -> None:
        self._values = 0

    def check(self, value: object, depth: int) -> object:
        """Return a checked copy of `value`."""
        self._values += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep; send what the worker makes")
        if self._values > _MAX_VALUES:
            raise ValueError(f"it has more than {_MAX_VALUES} values; send less")
        match value:
            case dict():
                return {_check_text(str(key)): self.check(inner, depth + 1) for key, inner in value.items()}
            case list() | tuple():
                return [self.check(inner, depth + 1) for inner in value]
            case str():
                return _check_text(value)
            case int() | float() if not isinstance(value, bool):
                return _check_number(value)
        return value


def _check_number(value: float) -> float:
    # An integer of JSON may be too large to become a float at all, so it is compared first.
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise ValueError("a number is too large; the limit is 1e18")
    if not math.isfinite(value) or abs(value) > _MAX_NUMBER:
        raise ValueError("a number is not finite or too large; the limit is 1e18")
    return value


def _check_text(text: str) -> str:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a text has {len(text)} characters; the limit is {_MAX_TEXT}")
    return one_line(text)
