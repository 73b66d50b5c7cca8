import io
import logging
from collections.abc import Iterator

import pytest

from mimatrix.core.logs import configure_logging


@pytest.fixture(autouse=True)
def _fresh_logger() -> Iterator[None]:
    logger = logging.getLogger("mimatrix")
    handlers, level = logger.handlers[:], logger.level
    logger.handlers[:] = []
    logger.setLevel(logging.NOTSET)
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def use_root_handlers(monkeypatch: pytest.MonkeyPatch, *handlers: logging.Handler) -> None:
    """Replace pytest's own handlers, which it installs for the time of a test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", list(handlers))


def test_messages_have_time_and_level(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    use_root_handlers(monkeypatch)
    configure_logging()
    configure_logging()
    logging.getLogger("mimatrix.engine.run").info("step 3 done")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("INFO mimatrix: step 3 done")


def test_quiet_keeps_warnings_until_the_next_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_root_handlers(monkeypatch)
    configure_logging(quiet=True)
    logging.getLogger("mimatrix.comm").info("tuned")
    logging.getLogger("mimatrix.comm").warning("slow link")
    assert "tuned" not in (shown := capsys.readouterr().err)
    assert "WARNING mimatrix: slow link" in shown
    configure_logging()
    logging.getLogger("mimatrix.comm").info("tuned")
    assert "tuned" in capsys.readouterr().err


@pytest.mark.parametrize("before", [True, False])
def test_a_program_with_its_own_handlers_gets_each_message_once(
    before: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may set them up before `mimatrix.init` or after; a worker of a job configures logging before its script."""
    text = io.StringIO()
    use_root_handlers(monkeypatch)
    if not before:
        configure_logging()
    use_root_handlers(monkeypatch, logging.StreamHandler(text))
    configure_logging()
    logging.getLogger("mimatrix").warning("hello")
    assert text.getvalue() == "hello\n"
    assert capsys.readouterr().err == ""


def test_the_level_of_a_program_with_its_own_handlers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    use_root_handlers(monkeypatch, logging.StreamHandler(text))
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]
    configure_logging()
    logging.getLogger("mimatrix.engine").info("measured")
    assert text.getvalue() == ""
    configure_logging(quiet=True)
    logging.getLogger("mimatrix.engine").warning("slow")
    assert text.getvalue() == "slow\n"


def test_a_handler_on_our_logger_replaces_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_root_handlers(monkeypatch)
    text = io.StringIO()
    logging.getLogger("mimatrix").addHandler(logging.StreamHandler(text))
    configure_logging()
    logging.getLogger("mimatrix").warning("hello")
    assert text.getvalue() == "hello\n"
    assert capsys.readouterr().err == ""
