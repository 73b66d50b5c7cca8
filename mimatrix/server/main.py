"""`mimatrix up`: one process that serves requests, and a controller thread in it. It may be killed at any moment."""

import errno
import fcntl
import gc
import getpass
import logging
import os
import pwd
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvicorn
from sqlalchemy import select

from mimatrix.api.client import ADDRESS_FILE, TOKEN_FILE
from mimatrix.api.models import Role
from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.files import write_atomic
from mimatrix.launch import Launcher
from mimatrix.server.app import create_app
from mimatrix.server.auth.tokens import Authenticator, issue
from mimatrix.server.context import Context
from mimatrix.server.controller.faults import RepeatedLog
from mimatrix.server.controller.job_environment import JobEnvironment
from mimatrix.server.controller.reconcile import Controller
from mimatrix.server.controller.retention import RetentionSettings
from mimatrix.server.controller.start_threads import StartThreads
from mimatrix.server.db.engine import address_in, opened
from mimatrix.server.db.exclusive import DatabaseTakenError, check_local, exclusive_file, exclusive_use
from mimatrix.server.db.models import TokenRow
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.settings import ServerSettings, check_settings, warnings_for, with_reachable_address
from mimatrix.server.web.header_timeout import HeaderTimeoutProtocol
from mimatrix.server.web.limits import raise_file_limit

_TURN_S, _STOP_S = 0.5, 10.0
_ARCHIVES = "code-archives"
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
"""What jobs see of the server's environment: nothing that could be secret."""
logger = logging.getLogger(__name__)


def serve(settings: ServerSettings, launcher_in: Callable[[Path], Launcher]) -> None:
    """Serve until SIGTERM or SIGINT. Jobs continue, and the next server on the same data finds them again.

    Raises:
        UserError: A setting is invalid, or another server uses the port, the data or the database.
        DatabaseTakenError: The connection to the database was lost, and another server uses it now.
    """
    check_settings(settings)
    connections = raise_file_limit()
    given, settings = settings, with_reachable_address(settings)
    _make_folders(settings)
    with ExitStack() as stack:
        stack.enter_context(_lock(settings.data))
        listener = stack.enter_context(bind(settings))
        address = settings.database or address_in(settings.data)
        stack.enter_context(exclusive_file(address))
        engine, sessions = opened(address)
        stack.callback(engine.dispose)
        check_database = stack.enter_context(exclusive_use(engine))
        launcher = launcher_in(settings.data)
        stack.callback(launcher.close)
        context = Context(
            sessions,
            launcher,
            CodeArchives(settings.data / _ARCHIVES),
            Authenticator(sessions, time.time),
            time.time,
        )
        retention = RetentionSettings(checkpoints_s=settings.checkpoints_s)
        controller = Controller(context, _job_environment(settings), StartThreads(), retention)
        controller.recover()
        _first_token(context, settings)
        _store(settings.data / ADDRESS_FILE, settings.address)
        server = uvicorn.Server(_uvicorn(settings, context, controller, connections))
        thread = _ControllerThread(controller, context, check_database, server)
        thread.start()
        stack.callback(thread.stop)
        for warning in warnings_for(settings, given):
            logger.warning(warning)
        logger.info("dashboard: %s, API: %s/docs, data: %s", settings.address, settings.address, settings.data)
        # The objects made so far stay: searching them for garbage again and again would delay every request.
        gc.freeze()
        server.run([listener])
        if thread.taken:
            raise thread.taken


def _make_folders(settings: ServerSettings) -> None:
    """Create the directories, for this user alone. Jobs of another user may only pass through to their own."""
    folders = (
        (settings.data / _ARCHIVES, 0o700),
        (settings.data / "launcher", 0o711),
        (settings.checkpoint_folder, 0o711),
    )
    try:
        settings.data.mkdir(parents=True, exist_ok=True)
        if not settings.database:
            check_local(settings.data)
        settings.data.chmod(0o711 if settings.run_as else 0o700)
        for folder, mode in folders:
            # A directory that was there before keeps the permissions that its owner chose.
            if not folder.is_dir() or folder.parent == settings.data:
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(mode)
            if not os.access(folder, os.W_OK | os.X_OK):  # now, and not at the first job
                raise OSError(errno.EACCES, "it cannot be written to", str(folder))
    except OSError as error:
        raise UserError(
            f'"{error.filename or settings.data}" cannot be used ({error.strerror}); give another --data or '
            "--checkpoints directory"
        ) from None


class _ControllerThread(threading.Thread):
    """Runs the controller twice a second, and whenever there is something to decide, while the database is ours."""

    def __init__(
        self, controller: Controller, context: Context, check_database: Callable[[], None], server: uvicorn.Server
    ) -> None:
        super().__init__(name="mimatrix-controller", daemon=True)
        self._controller, self._context = controller, context
        self._check_database, self._server = check_database, server
        self._log = RepeatedLog(context.monotonic)
        self._is_stopped = False
        self.taken: DatabaseTakenError | None = None
        """Why this server ends: another one has the database."""

    def run(self) -> None:
        """Run until stopped. What fails within a turn is contained there."""
        while not self._is_stopped:
            if self._has_database():
                self._controller.reconcile()
            self._context.wake.wait(_TURN_S)
            self._context.wake.clear()

    def _has_database(self) -> bool:
        """Return whether this turn may decide; if another server has the database, nothing may any more."""
        try:
            self._check_database()
        except DatabaseTakenError as error:
            self.taken, self._is_stopped, self._server.should_exit = error, True, True
        except WorldError as error:
            self._log.warn(str(error))
        else:
            return True
        return False

    def stop(self) -> None:
        """Stop after the current turn, and the starts that have begun."""
        deadline_s = time.monotonic() + _STOP_S
        self._is_stopped = True
        self._context.wake.set()
        self.join(timeout=_STOP_S)
        self._controller.stop(deadline_s - time.monotonic())


def _job_environment(settings: ServerSettings) -> JobEnvironment:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if settings.run_as:
        account = pwd.getpwnam(settings.run_as)
        environment |= {"HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    command = (settings.python, "-m", "mimatrix.worker")
    checkpoints = str(settings.checkpoint_folder)
    return JobEnvironment(
        address=settings.address,
        command=command,
        variables=environment,
        run_as=settings.run_as,
        checkpoints=checkpoints,
    )


def _uvicorn(settings: ServerSettings, context: Context, controller: Controller, connections: int) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(context, controller),
        http=HeaderTimeoutProtocol,
        log_level="warning",
        access_log=False,
        limit_concurrency=connections,
        # Otherwise every client could choose the address that the audit log shows.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=5,
        ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
        server_header=False,
    )


def _first_token(context: Context, settings: ServerSettings) -> None:
    """Create an admin token if there is none or its file was lost, and store it where only this user can read it."""
    file, user = settings.data / TOKEN_FILE, getpass.getuser()
    with context.sessions.begin() as session:
        known = session.scalar(select(TokenRow).where(TokenRow.role == Role.ADMIN, TokenRow.ended_at.is_(None)))
        # The owner of the directory owns the server, and gets another token if the file was lost.
        if known and file.is_file():
            return
        _, secret = issue(session, user, Role.ADMIN, context.clock())
        _store(file, secret)
    # Standard error may be a log that others read; a terminal is in front of the user alone.
    if sys.stderr.isatty():
        sys.stderr.write(f"mimatrix: the token of {user} (admin): {secret}\n")
    logger.info("the token of %s (admin) is in %s", user, file)


def _store(file: Path, text: str) -> None:
    """Write a file that only this user can read."""
    write_atomic(file, text + "\n", mode=0o600)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock the data directory: two servers on it would allocate devices twice."""
    # Jobs of other users must not be able to open it, since they could hold the lock then.
    handle = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(handle, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserError(f"another server uses {folder}; stop it, or give another --data directory") from None
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def bind(settings: ServerSettings) -> Iterator[socket.socket]:
    """Bind the port, before anything else is done.

    Raises:
        UserError: The address is not one of this machine, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named; otherwise answers are delayed by 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise UserError(
                f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); give another --port"
            ) from None
        listener.listen(1024)
        yield listener
