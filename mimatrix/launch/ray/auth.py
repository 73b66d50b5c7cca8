"""Ray's token: a process that has it may run anything on all machines, any other nothing."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from mimatrix.core.errors import UserError, WorldError

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_BYTES = 32


def ray_environment(folder: Path, outside: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes that speak with Ray: with a token, unless `RAY_AUTH_MODE` says otherwise.

    The token is the one in `outside`, or else the one in the directory.

    Raises:
        UserError: There was no token, so one was made; the message says what to do with it.
    """
    # With a wrong token Ray would try for twenty seconds.
    told = {"RAY_NUM_REDIS_GET_RETRIES": "3", **outside, "RAY_USAGE_STATS_ENABLED": "0"}
    if told.setdefault(_MODE, "token") != "token" or told.get(_TOKEN) or told.get(_PATH) or _usual(told).is_file():
        return told
    file = folder / "ray-token"
    if not file.is_file():
        _make(file)
        raise UserError(
            f"Ray has no token here, so one was made: copy {file} to ~/.ray/auth_token on all machines, and start Ray "
            "on them again"
        )
    return told | {_PATH: str(file)}


def _usual(told: Mapping[str, str]) -> Path:
    """Return where Ray itself looks for a token."""
    return Path(told.get("HOME") or Path.home()) / ".ray" / "auth_token"


def _make(file: Path) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(file, "x", encoding="ascii", opener=lambda path, flags: os.open(path, flags, 0o600)) as made:
            made.write(secrets.token_hex(_BYTES))
    except OSError as error:
        raise WorldError(f"no token for Ray can be written to {file} ({error.strerror})") from None
