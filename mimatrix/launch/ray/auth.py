"""Ray's token: who has it may run anything on all machines, and who has not may do nothing."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from mimatrix.core.errors import UserError, WorldError

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_BYTES = 32


def ray_environment(folder: Path, outside: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Ray is spoken with: with a token, unless `RAY_AUTH_MODE` says otherwise.

    The token is the one outside, or else the one in the folder. Where there is none one is made, and the person is
    told what to do with it.
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
            "on them anew"
        )
    return told | {_PATH: str(file)}


def _usual(told: Mapping[str, str]) -> Path:
    """Where Ray itself looks."""
    return Path(told.get("HOME") or Path.home()) / ".ray" / "auth_token"


def _make(file: Path) -> None:
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(file, "x", encoding="ascii", opener=lambda path, flags: os.open(path, flags, 0o600)) as made:
            made.write(secrets.token_hex(_BYTES))
    except OSError as error:
        raise WorldError(f"no token for Ray can be written to {file} ({error.strerror})") from None
