"""Tokens: secrets that only their bearers have. The server keeps hashes, and caches what it has looked up."""

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from sqlalchemy import select
from sqlalchemy.orm import Session

from mimatrix.api.models import Role
from mimatrix.server.db.engine import Sessions
from mimatrix.server.db.models import TokenRow

_PREFIX = "mm_"
_CACHED_S, _WORKERS_S = 5.0, 60.0
"""Workers' tokens end with their jobs, which clears the cache; another process may revoke those of users."""
_MAX_CACHED = 20_000
_FAILURES, _WITHIN_S = 10, 60.0
_MAX_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class Bearer:
    """The owner of a token."""

    token: int
    user: str
    role: Role
    job: int | None = None


def digest_of(secret: str) -> str:
    """Return what is stored of a secret. Secrets are long and random, so one round of hashing is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def issue(session: Session, user: str, role: Role, now_s: float, job: int | None = None) -> tuple[TokenRow, str]:
    """Create a token, and return it with its secret, which cannot be found out later."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    row = TokenRow(user=user, role=role, digest=digest_of(secret), job=job, created_at=now_s)
    session.add(row)
    session.flush()
    return row, secret


def revoke_of_job(session: Session, job: int, now_s: float) -> None:
    """Revoke the tokens of a job's workers."""
    for row in session.scalars(select(TokenRow).where(TokenRow.job == job, TokenRow.ended_at.is_(None))):
        row.ended_at = now_s


class Authenticator:
    """Finds the bearers of secrets; addresses that guess are throttled."""

    def __init__(self, sessions: Sessions, clock: Callable[[], float]) -> None:
        self._sessions, self._clock = sessions, clock
        self._known: dict[str, tuple[Bearer, float]] = {}
        self._failures: dict[str, deque[float]] = {}
        self._lock = Lock()
        self.refusals = 0
        """Requests without a valid token, since the server started."""

    def cached(self, secret: str) -> Bearer | None:
        """Return the bearer if it was looked up a moment ago, without asking the database."""
        found = self._known.get(digest_of(secret))
        return found[0] if found and found[1] > self._clock() else None

    def authenticate(self, secret: str, address: str) -> Bearer | None:
        """Return the bearer of a secret; None if it is unknown or revoked."""
        digest = digest_of(secret)
        with self._sessions() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.digest == digest, TokenRow.ended_at.is_(None)))
        if row is None or not hmac.compare_digest(row.digest, digest):
            self._failed(address)
            return None
        bearer = Bearer(row.id, row.user, Role(row.role), row.job)
        lasts_s = _WORKERS_S if bearer.role is Role.WORKER else _CACHED_S
        with self._lock:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[digest] = (bearer, self._clock() + lasts_s)
        return bearer

    def is_throttled(self, address: str) -> bool:
        """Return whether too many wrong secrets came from this address recently."""
        now = self._clock()
        with self._lock:
            failures = self._failures.get(address)
            while failures and failures[0] < now - _WITHIN_S:
                failures.popleft()
            return failures is not None and len(failures) >= _FAILURES

    def clear(self) -> None:
        """Clear the cache, since tokens were revoked."""
        with self._lock:
            self._known.clear()

    def _failed(self, address: str) -> None:
        with self._lock:
            if len(self._failures) >= _MAX_ADDRESSES:
                self._failures.clear()
            self._failures.setdefault(address, deque(maxlen=_FAILURES)).append(self._clock())
