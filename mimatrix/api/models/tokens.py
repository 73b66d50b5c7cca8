"""Tokens, their owners and their roles."""

from enum import StrEnum

from mimatrix.api.models.base import Message, Name


class Role(StrEnum):
    """What the bearer of a token may do."""

    ADMIN = "admin"
    USER = "user"
    VIEWER = "viewer"
    WORKER = "worker"


class TokenWanted(Message):
    """A token to be made."""

    user: Name
    role: Role


class Token(Message):
    """A token as it is shown once, and then never again."""

    id: int
    user: str
    role: Role
    secret: str = ""


class Me(Message):
    """Whose token it is."""

    user: str
    role: Role
