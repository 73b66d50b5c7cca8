"""When a host counts as silent: its kernel has not answered for a while, whatever its processes do.

The kernel of each end probes the other end of an idle connection, and answers probes itself. So a process that holds
the interpreter's lock, computes for minutes, or is stopped in a debugger is not taken for a host that is gone. There is
one exception: a process that does not read until the socket buffers of both ends are full, and then for the limit.
"""

import errno
import socket
import struct
import time

from mimatrix.core import environment
from mimatrix.core.errors import UserError

DEFAULT_SILENCE_S = 8.0
"""A second less than ten, since the kernel looks once a second, and the news has to travel."""
_MIN_SILENCE_S = 1.0
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN})
# `tcpi_last_ack_recv` in `struct tcp_info`, in milliseconds: the last moment at which the other kernel answered.
_LAST_ANSWER = struct.Struct("=56xI")


def silence_limit() -> float:
    """Return MIMATRIX_SILENCE_S, or the default.

    Raises:
        UserError: It is not a number of seconds from 1 on.
    """
    text = environment.SILENCE_S.get()
    try:
        limit_s = float(text or DEFAULT_SILENCE_S)
    except ValueError:
        limit_s = 0.0
    if not _MIN_SILENCE_S <= limit_s < float("inf"):
        raise UserError(f'{environment.SILENCE_S.name} is "{text}"; use a number of seconds from 1 on')
    return limit_s


def watch_host(stream: socket.socket, silence_s: float) -> None:
    """Let a connection break once the other end's kernel has been silent for `silence_s`, idle or not."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s / 4)))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    # Ends the probes instead of a number of them, and covers data that are not acknowledged or not read too.
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))


def is_silence(error: OSError) -> bool:
    """Return whether a connection broke because the other host does not answer."""
    return error.errno in _SILENT


def describe_break(stream: socket.socket, error: OSError) -> str:
    """Return why a connection broke, and if its host is silent, since when."""
    if not is_silence(error):
        return f"its connection broke ({error.strerror})"
    return f"its host has been silent since {_last_answer(stream)}"


def _last_answer(stream: socket.socket) -> str:
    """Return the time of day at which the other kernel last answered."""
    try:
        (age_ms,) = _LAST_ANSWER.unpack(stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ANSWER.size))
    except (OSError, struct.error):
        age_ms = 0
    return time.strftime("%H:%M:%S", time.localtime(time.time() - age_ms / 1000))
