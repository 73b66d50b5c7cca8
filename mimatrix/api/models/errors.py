"""Error answers."""

from pydantic import ConfigDict

from mimatrix.api.models.base import Message


class Problem(Message):
    """What went wrong, after RFC 9457."""

    model_config = ConfigDict(extra="ignore")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    """One sentence, and the fix."""
