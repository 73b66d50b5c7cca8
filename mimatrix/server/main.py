"""`mimatrix up`: one process that serves, and a thread of it that decides. It may be killed at any moment."""

import fcntl
import gc
import getpass
import os
import pwd
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from sqlalchemy import select

from mimatrix.api.client import ADDRESS_FILE, TOKEN_FILE
from mimatrix.api.models import Role
from mimatrix.core.errors import UserError
from mimatrix.core.files import write_atomic
from mimatrix.launch import Launcher
from mimatrix.server.app import create_app
from mimatrix.server.auth.tokens import Authenticator, issue
from mimatrix.server.context import Context
from mimatrix.server.controller.reconcile import Loop, Serving
from mimatrix.server.db.engine import DATABASE_FILE, address_in, opened
from mimatrix.server.db.models import TokenRow
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.web.addresses import is_any, is_loopback, own_address
from mimatrix.server.web.header_timeout import HeaderTimeoutProtocol
from mimatrix.server.web.tls import check_certificate

_TURN_S = 0.5
_KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "USER",
    "LOGNAME",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""Of the server's environment, what jobs see: nothing that could be secret."""


@dataclass(frozen=True)
class Settings:
    """How to serve."""

    data: Path
    host: str = "127.0.0.1"
    port: int = 7700
    database: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    python: str = sys.executable
    run_as: str = ""
    advertise: str = ""

    @property
    def address(self) -> str:
        """As clients and workers write it."""
        if self.advertise:
            return self.advertise
        scheme = "https" if self.tls_cert else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


def check(settings: Settings) -> None:
    """Refuse what cannot be served, before anything is made."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise UserError("TLS needs a certificate and its key; give both --tls-cert and --tls-key")
    if settings.tls_cert and settings.tls_key:
        check_certificate(settings.tls_cert, settings.tls_key)
    if settings.run_as and settings.run_as not in {entry.pw_name for entry in pwd.getpwall()}:
        raise UserError(f'there is no user "{settings.run_as}" for --run-as; name one of this machine')
    if not shutil.which(settings.python):
        raise UserError(f'there is no Python "{settings.python}"; give --python the path of one')
    if settings.advertise and not settings.advertise.startswith(("http://", "https://")):
        raise UserError(f'"{settings.advertise}" is no address; write --advertise http://name:7700')
    if not is_loopback(settings.host) and not settings.tls_cert and not settings.insecure:
        raise UserError(
            f"{settings.host} can be reached from outside, where tokens could be read on the way; give --tls-cert and "
            "--tls-key, or --insecure if the network is yours alone"
        )


def reachable(settings: Settings, own: Callable[[bool], str] = own_address) -> Settings:
    """With an address that clients and workers can use, where it listens on all addresses of this machine."""
    if settings.advertise or not is_any(settings.host):
        return settings
    if settings.tls_cert:
        raise UserError(
            f"{settings.host} is no address that a certificate is for; give --advertise https://NAME:{settings.port}, "
            "with a name that the certificate has"
        )
    found = own(":" in settings.host)
    if not found:
        raise UserError(
            f"{settings.host} is no address that workers could use, and this machine shows no other; give --advertise "
            f"http://NAME:{settings.port}"
        )
    host = f"[{found}]" if ":" in found else found
    return replace(settings, advertise=f"http://{host}:{settings.port}")


def cautions(settings: Settings, asked: Settings) -> Iterator[str]:
    """What whoever starts it should know: `settings` as it serves, `asked` as it was told to."""
    if settings.advertise != asked.advertise:
        yield f"clients and workers are told {settings.address}; give --advertise if they should use another address"
    if settings.insecure and not settings.tls_cert and not is_loopback(settings.host):
        yield (
            f"insecure: {settings.host} is served without TLS, so whoever is on the way can read tokens and act with "
            "them; give --tls-cert and --tls-key unless the network is yours alone"
        )


def serve(settings: Settings, launcher_in: Callable[[Path], Launcher], say: Callable[[str], None]) -> None:
    """Until SIGTERM or SIGINT. Jobs go on, and are found again by the next one on the same folder."""
    check(settings)
    asked, settings = settings, reachable(settings)
    _make_folder(settings)
    with _only_one(settings.data), _bound(settings) as listener:
        engine, sessions = opened(settings.database or address_in(settings.data))
        launcher = launcher_in(settings.data)
        context = Context(
            sessions,
            launcher,
            CodeArchives(settings.data / "code-archives"),
            Authenticator(sessions, time.time),
            time.time,
        )
        loop = Loop(context, _serving(settings), say)
        loop.recover()
        _first_token(context, settings, say)
        _leave(settings.data / ADDRESS_FILE, settings.address)
        turning = _Turning(loop, context, say)
        turning.start()
        for caution in cautions(settings, asked):
            say(caution)
        say(f"serving on {settings.address}, data in {settings.data}; docs at {settings.address}/docs")
        server = uvicorn.Server(_uvicorn(settings, context, loop))
        # What is here now stays: looking through it again and again for what is not would make everybody wait.
        gc.freeze()
        try:
            server.run([listener])
        finally:
            turning.stop()
            launcher.close()
            engine.dispose()


def _make_folder(settings: Settings) -> None:
    """For this user alone. Jobs of another user may pass through to their own folders, and see no more than those."""
    try:
        settings.data.mkdir(parents=True, exist_ok=True)
        settings.data.chmod(0o711 if settings.run_as else 0o700)
        for name, mode in (("code-archives", 0o700), ("launcher", 0o711), ("checkpoints", 0o711)):
            (settings.data / name).mkdir(exist_ok=True)
            (settings.data / name).chmod(mode)
        (settings.data / DATABASE_FILE).touch(mode=0o600)
        (settings.data / DATABASE_FILE).chmod(0o600)
    except OSError as error:
        raise UserError(f'"{settings.data}" cannot be used ({error.strerror}); give another --data folder') from None


class _Turning(threading.Thread):
    """Goes around, twice a second and whenever there is something to decide."""

    def __init__(self, loop: Loop, context: Context, say: Callable[[str], None]) -> None:
        super().__init__(name="mimatrix-loop", daemon=True)
        self._loop, self._context, self._say = loop, context, say
        self._over = False
        self._said = ""

    def run(self) -> None:
        """Until it is stopped; a turn that fails is told, and followed by the next."""
        while not self._over:
            try:
                self._loop.turn()
                self._said = ""
            except Exception as error:  # noqa: BLE001 (the next turn may do better)
                if self._said != str(error):
                    self._said = str(error)
                    self._say("".join(traceback.format_exception(error)))
            self._context.wake.wait(_TURN_S)
            self._context.wake.clear()

    def stop(self) -> None:
        """After the turn that it is in."""
        self._over = True
        self._context.wake.set()
        self.join(timeout=10.0)


def _serving(settings: Settings) -> Serving:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if settings.run_as:
        account = pwd.getpwnam(settings.run_as)
        environment |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    checkpoints = str(settings.data / "checkpoints")
    words = (settings.python, "-m", "mimatrix.worker")
    return Serving(settings.address, words, environment, settings.run_as, checkpoints=checkpoints)


def _uvicorn(settings: Settings, context: Context, loop: Loop) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(context, loop),
        http=HeaderTimeoutProtocol,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=5,
        ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
        server_header=False,
    )


def _first_token(context: Context, settings: Settings, say: Callable[[str], None]) -> None:
    """An admin's, if there is none or it was lost; it is shown once, and left where only this user can read it."""
    with context.sessions.begin() as session:
        known = session.scalar(select(TokenRow).where(TokenRow.role == Role.ADMIN, TokenRow.ended_at.is_(None)))
        # Whoever owns the folder owns the server: one who lost the file gets another token.
        if known and (settings.data / TOKEN_FILE).is_file():
            return
        _, secret = issue(session, getpass.getuser(), Role.ADMIN, context.clock())
        _leave(settings.data / TOKEN_FILE, secret)
    say(f"the token of {getpass.getuser()} (admin), shown this once: {secret}")


def _leave(file: Path, text: str) -> None:
    """For the command of the same user."""
    write_atomic(file, text + "\n", mode=0o600)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two servers on one folder would give devices twice."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"a server runs on {folder} already; stop it, or give another --data folder") from None
        yield


@contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    """The port, taken before anything else is done."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Only where the protocol is named does asyncio turn Nagle's algorithm off; with it, answers come 40 ms late.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise UserError(
                f"{settings.host} port {settings.port} cannot be listened on ({error.strerror}); give another --port"
            ) from None
        listener.listen(1024)
        yield listener
