"""What is stored of users' usage may be damaged: it is counted from 0 again, and jobs are still scheduled."""

from pathlib import Path

import pytest
from sqlalchemy import text
from support.servers import AppServer, app_server
from test_controller import row, submitted, turned_until

from mimatrix.api.models import ENDED, JobState


@pytest.mark.parametrize("amount", ["'abc'", "-1", "9e999", "x'00'"])
def test_damaged_usage_stops_no_scheduling(tmp_path: Path, amount: str) -> None:
    with app_server(tmp_path) as there:
        first = submitted(there, "print(1)")
        turned_until(there, first, *ENDED)
        _store(there, amount)
        second, waiting = submitted(there, "print(2)"), submitted(there, "print(3)", devices="9")
        assert turned_until(there, second, *ENDED).state == JobState.DONE
        with there.context.sessions.begin() as session:
            session.execute(text("UPDATE jobs SET reason_data = '[]' WHERE id = :id"), {"id": waiting})
        third = submitted(there, "print(4)")
        assert turned_until(there, third, *ENDED).state == JobState.DONE
        assert row(there, waiting).reason_data["wait"]["kind"] == "too_few_devices", "it is written again"


def _store(there: AppServer, amount: str) -> None:
    with there.context.sessions.begin() as session:
        session.execute(text("DELETE FROM usage"))
        session.execute(text(f"INSERT INTO usage (user, amount, at) VALUES ('ben', {amount}, 0)"))
