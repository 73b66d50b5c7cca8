"""Rows that cannot be read, as of a damaged database: each harms only itself."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from sqlalchemy import Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from mimatrix.server.db.engine import DATABASE_UNAVAILABLE
from mimatrix.server.db.models import Base

logger = logging.getLogger(__name__)
_MAX_REMEMBERED = 10_000
Row = TypeVar("Row", bound=Base)
Contain = Callable[[Any], AbstractContextManager[None]]
"""Contains exceptions of the row with this key."""


class UnreadableRows:
    """Contains what the rows of one server make a reader raise, and logs each of them once."""

    def __init__(self) -> None:
        self._logged: OrderedDict[tuple[str, object], None] = OrderedDict()

    @contextmanager
    def contain(self, what: str, key: object) -> Iterator[None]:
        """Keep an exception from reaching other rows. A database that does not answer is not the fault of a row."""
        try:
            yield
        except DATABASE_UNAVAILABLE:
            raise
        except Exception as error:  # noqa: BLE001 (whatever the row makes the driver or a conversion raise)
            self._log(what, key, error)

    def _log(self, what: str, key: object, error: Exception) -> None:
        if (what, key) in self._logged:
            return
        self._logged[what, key] = None
        if len(self._logged) > _MAX_REMEMBERED:
            self._logged.popitem(last=False)
        text = str(error).partition("\n")[0]
        logger.warning("%s %s: its stored data cannot be read (%s: %s)", what, key, type(error).__name__, text)


def load_rows(
    session: Session, wanted: Select[Row], table: type[Row], key: InstrumentedAttribute[Any], contain: Contain
) -> list[Row]:
    """Read rows with one query. If one of them cannot be read, read each by itself, and leave that one out.

    Args:
        session: Rolled back before rows are read by themselves.
        wanted: Selects whole rows of this table.
        table: The table.
        key: The primary key.
        contain: Called with the key of each row that is read by itself.
    """
    try:
        return list(session.scalars(wanted))
    except DATABASE_UNAVAILABLE:
        raise
    except Exception:  # noqa: BLE001 (whatever one row makes the driver raise)
        session.rollback()
    rows = []
    for each in session.scalars(wanted.with_only_columns(key)).all():
        with contain(each):
            rows.append(session.get_one(table, each))
    return rows
