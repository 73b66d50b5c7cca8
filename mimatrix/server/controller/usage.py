"""Recent device-seconds of each user, for the scheduler's fair shares."""

import logging
import math
from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.orm import Session

from mimatrix.scheduler import Running
from mimatrix.scheduler.fairshare import decay_and_add
from mimatrix.server.context import Context
from mimatrix.server.db.models import UsageRow

logger = logging.getLogger(__name__)
_MAX_AMOUNT = 1e18


class UsageCounter:
    """Adds what running jobs use between two calls."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counted_s: float | None = None

    def count(self, running: Iterable[Running]) -> None:
        """Add the time since the last call, by the monotonic clock."""
        now_s = self._context.monotonic()
        since_s = self._counted_s if self._counted_s is not None else now_s
        self._counted_s = now_s
        with self._context.sessions.begin(durable=False) as session:
            rows = {row.user: row for row in session.scalars(select(UsageRow))}
            before = {user: _amount(row) for user, row in rows.items()}
            for user, amount in decay_and_add(before, running, now_s - since_s).items():
                row = rows.get(user) or UsageRow(user=user)
                row.amount, row.at = min(_MAX_AMOUNT, amount), self._context.clock()
                session.add(row)


def read_usage(session: Session) -> dict[str, float]:
    """Return the recent usage of each user."""
    return {row.user: _amount(row) for row in session.scalars(select(UsageRow))}


def _amount(row: UsageRow) -> float:
    """Return what is stored, or 0 if that is not an amount: it must not stop the scheduling of all jobs."""
    amount: object = row.amount
    if isinstance(amount, int | float) and math.isfinite(amount) and amount >= 0:
        return float(amount)
    logger.warning("the usage of %s is stored as %r; it is counted from 0 again", row.user, amount)
    return 0.0
