"""Jobs as TOML files: the options of `mimatrix submit` under the same names."""

from pathlib import Path
from typing import Any

from mimatrix.core.config import Table, read_table
from mimatrix.core.errors import UserError
from mimatrix.core.units import parse_duration


def read_job(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of the script, relative to the file, and the options that the file gives."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f'the job file "{path}" cannot be read ({error}); check its name') from None
    table = read_table(path.name, text, "docs/jobs.md")
    script = table.take("script", str)
    found: dict[str, Any] = {
        "name": table.take("name", str, ""),
        "devices": _number_or_text(table, "devices", 'devices = 2 or devices = "a100:2"'),
        "priority": table.take("priority", int, None),
        "preemptible": table.take("preemptible", bool, None),
        "max_time_s": _max_time_s(table),
        "max_restarts": table.take("retries", int, None),
        "groups": table.take("groups", str, ""),
        "arguments": tuple(map(str, table.take("arguments", list, []))) or None,
    }
    variables = table.take("env", dict, {})
    found["environment"] = {str(name): str(value) for name, value in variables.items()} or None
    table.close()
    return path.parent / script, {key: value for key, value in found.items() if value not in (None, "")}


def _max_time_s(table: Table) -> float | None:
    text = _number_or_text(table, "max_time", 'max_time = "2h" or max_time = 7200')
    try:
        return parse_duration(text) if text else None
    except UserError as error:
        raise table.fail("max_time", str(error)) from None


def _number_or_text(table: Table, key: str, example: str) -> str:
    """Return a text, or a whole number as text: it means the same without quotes."""
    value = table.take(key, object, "")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise table.fail(key, f"wanted a whole number or a text; write {example}")
    return str(value)
