"""Error answers."""

from pydantic import ConfigDict

from mimatrix.api.models.base import Message


class Problem(Message):
    """An error, as RFC 9457 describes it."""

    model_config = ConfigDict(extra="ignore")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    """One sentence with the fix."""
