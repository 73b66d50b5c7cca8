"""Settings of `mimatrix up`, and what can be refused before anything is created."""

import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.server.web.addresses import is_any, is_loopback, own_address
from mimatrix.server.web.tls import check_certificate

_LOOK_S = 30.0
"""How long a Python may take to say whether it finds MiMatrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How to serve."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 7700
    database: str = ""
    """postgresql://...; empty: SQLite in the data directory."""
    checkpoints: Path | None = None
    """A directory on a file system that all nodes share; None: within the data directory."""
    checkpoints_s: float | None = None
    """How long checkpoints of jobs that have ended are kept; None: for good."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    python: str = sys.executable
    run_as: str = ""
    advertise: str = ""
    trusted_proxies: str = ""
    """Addresses whose X-Forwarded-For header is believed; empty: none."""

    @property
    def address(self) -> str:
        """The address that clients and workers use."""
        if self.advertise:
            return self.advertise
        scheme = "https" if self.tls_cert else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    @property
    def checkpoint_folder(self) -> Path:
        """The directory in which every job has one for its checkpoints."""
        return self.checkpoints or self.data / "checkpoints"


def check_settings(settings: ServerSettings) -> None:
    """Refuse what cannot be served.

    Raises:
        UserError: A setting is invalid, or does not fit another one.
    """
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise UserError("TLS needs a certificate and its key; give both --tls-cert and --tls-key")
    if settings.tls_cert and settings.tls_key:
        check_certificate(settings.tls_cert, settings.tls_key)
    if settings.run_as and settings.run_as not in {entry.pw_name for entry in pwd.getpwall()}:
        raise UserError(f'there is no user "{settings.run_as}" for --run-as; name one of this machine')
    if not shutil.which(settings.python):
        raise UserError(f'there is no Python "{settings.python}"; give --python the path of one')
    if settings.python != sys.executable and not _has_mimatrix(settings.python):
        raise UserError(f'MiMatrix is not installed for "{settings.python}"; give --python a Python that has it')
    if settings.advertise and not settings.advertise.startswith(("http://", "https://")):
        raise UserError(f'"{settings.advertise}" is not an address; write --advertise http://name:7700')
    if not is_loopback(settings.host) and not settings.tls_cert and not settings.insecure:
        raise UserError(
            f"{settings.host} is reachable from other machines, and tokens would be sent in clear text; give "
            "--tls-cert and --tls-key, or --insecure if you trust the network"
        )


def _has_mimatrix(python: str) -> bool:
    """Return whether a program is a Python that finds MiMatrix."""
    look = "import importlib.util; print('found' if importlib.util.find_spec('mimatrix') else 'missing')"
    try:
        words = [python, "-c", look]
        done = subprocess.run(  # noqa: S603 (who starts the server chose the program)
            words, capture_output=True, text=True, errors="replace", timeout=_LOOK_S, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == "found"


def with_reachable_address(settings: ServerSettings, own: Callable[[bool], str] = own_address) -> ServerSettings:
    """Return settings with an address that clients and workers can use, if the server listens on all addresses.

    Raises:
        UserError: No such address is known.
    """
    if settings.advertise or not is_any(settings.host):
        return settings
    if settings.tls_cert:
        raise UserError(
            f"a certificate cannot be for {settings.host}; give --advertise https://NAME:{settings.port}, with a name "
            "that the certificate has"
        )
    address = own(":" in settings.host)
    if not address:
        raise UserError(
            f"workers cannot use {settings.host}, and this machine has no other address; give --advertise "
            f"http://NAME:{settings.port}"
        )
    host = f"[{address}]" if ":" in address else address
    return replace(settings, advertise=f"http://{host}:{settings.port}")


def warnings_for(settings: ServerSettings, given: ServerSettings) -> Iterator[str]:
    """Yield what the administrator should know: `settings` as served, `given` as they were asked for."""
    if settings.advertise != given.advertise:
        yield f"clients and workers will use {settings.address}; give --advertise for another address"
    if settings.insecure and not settings.tls_cert and not is_loopback(settings.host):
        yield (
            f"insecure: {settings.host} is served without TLS, so the network can read tokens and use them; give "
            "--tls-cert and --tls-key unless you trust it"
        )
