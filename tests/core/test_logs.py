import logging
from collections.abc import Iterator

import pytest

from mimatrix.core.logs import configure_logging


@pytest.fixture
def _fresh() -> Iterator[None]:
    yield
    logging.getLogger("mimatrix").handlers.clear()
    logging.getLogger("mimatrix").propagate = True
    logging.getLogger("mimatrix").setLevel(logging.NOTSET)


pytestmark = pytest.mark.usefixtures("_fresh")


def without_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take pytest's own handlers away, which it installs for the time of a test."""
    for name in ("", "mimatrix"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])


def test_messages_have_time_and_level(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    without_handlers(monkeypatch)
    configure_logging()
    configure_logging()
    logging.getLogger("mimatrix.engine.run").info("step 3 done")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("INFO mimatrix: step 3 done")


def test_quiet_keeps_warnings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    without_handlers(monkeypatch)
    configure_logging(quiet=True)
    logging.getLogger("mimatrix.comm").info("tuned")
    logging.getLogger("mimatrix.comm").warning("slow link")
    assert "tuned" not in (shown := capsys.readouterr().err)
    assert "WARNING mimatrix: slow link" in shown


def test_a_program_with_its_own_logging_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().addHandler(logging.NullHandler())
    configure_logging()
    assert logging.getLogger("mimatrix").handlers == []
    logging.getLogger("mimatrix").info("hello")
    assert capsys.readouterr().err == ""
