"""A job as a TOML file: what `mimatrix submit` takes as options, under the same names."""

from pathlib import Path
from typing import Any

from mimatrix.core.config import read_table
from mimatrix.core.errors import UserError
from mimatrix.core.units import parse_seconds


def read_job(path: Path) -> tuple[Path, dict[str, Any]]:
    """The script, beside the file unless it says otherwise, and what is asked for it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f'the job file "{path}" cannot be read ({error}); check its name') from None
    table = read_table(path.name, text)
    script = table.take("script", str)
    found: dict[str, Any] = {
        "name": table.take("name", str, ""),
        "devices": table.take("devices", str, ""),
        "priority": table.take("priority", int, None),
        "preemptible": table.take("preemptible", bool, None),
        "max_time_s": table.parse("max_time", parse_seconds, None),
        "retries": table.take("retries", int, None),
        "arguments": tuple(map(str, table.take("arguments", list, []))) or None,
    }
    variables = table.take("env", dict, {})
    found["environment"] = {str(name): str(value) for name, value in variables.items()} or None
    table.close()
    return path.parent / script, {key: value for key, value in found.items() if value not in (None, "")}
