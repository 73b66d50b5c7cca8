"""Tokens, their owners and their roles."""

from enum import StrEnum

from mimatrix.api.models.base import Message, Name


class Role(StrEnum):
    """The roles that tokens carry."""

    ADMIN = "admin"
    USER = "user"
    VIEWER = "viewer"
    WORKER = "worker"


class TokenCreate(Message):
    """A token to be created."""

    user: Name
    role: Role


class Token(Message):
    """A token; its secret is shown only when it is created."""

    id: int
    user: str
    role: Role
    secret: str = ""


class WhoAmI(Message):
    """The user and the role of the token that was sent."""

    user: str
    role: Role
