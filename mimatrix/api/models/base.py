"""The base class of all messages, and the field types that they share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Message(BaseModel):
    """Frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(ge=0, le=1e15)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Metrics = Annotated[dict[Annotated[str, Field(max_length=100)], float | None], Field(max_length=32)]
"""What `run.log` was given, by name. None: not finite."""
