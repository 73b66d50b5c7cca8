"""Strangers at every listening socket: random and mutated bytes, connections that stay silent, and resets."""

import errno
import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimatrix.api.models import PROTOCOL
from mimatrix.core.framing import FrameFormat

_LISTENING_TCP, _LISTENING_UNIX = "0A", "00010000"
_MAGICS = (b"MMX2", b"MMX3", b"MMG3", b"MMH2", b"MMH3")
_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A socket that a process listens on: a TCP port, or a Unix socket by its (abstract) name."""

    pid: int
    command: str
    port: int = 0
    host: str = ""
    path: str = ""

    def connect(self) -> socket.socket:
        """Return a connection to it."""
        if self.path:
            stream = socket.socket(socket.AF_UNIX)
            stream.settimeout(_PATIENCE_S)
            stream.connect("\0" + self.path[1:] if self.path.startswith("@") else self.path)
            return stream
        return socket.create_connection((self.host, self.port), timeout=_PATIENCE_S)


def descendants(roots: Iterable[int]) -> set[int]:
    """Return these processes and all below them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def processes_with(word: str) -> set[int]:
    """Return the processes whose command line or environment has a word in it."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if word.encode() in text and int(entry.name) != os.getpid():
                found.add(int(entry.name))
    return found


def listeners_of(pids: Iterable[int]) -> list[OpenSocket]:
    """Return what these processes listen on, TCP and Unix."""
    owners: dict[str, int] = {}
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(entry.readlink())
                    if target.startswith("socket:["):
                        owners[target[8:-1]] = pid
    return [*_tcp(owners), *_unix(owners)]


def _tcp(owners: dict[str, int]) -> Iterable[OpenSocket]:
    for table in ("tcp", "tcp6"):
        file = Path(f"/proc/net/{table}")
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING_TCP and fields[9] in owners:
                address, port = fields[1].split(":")
                pid = owners[fields[9]]
                yield OpenSocket(pid, _command(pid), int(port, 16), _host(address))


def _host(address: str) -> str:
    """Return the address to connect to for one of the kernel's tables: words of 32 bits in the machine's order."""
    packed = b"".join(struct.pack("=I", int(address[place : place + 8], 16)) for place in range(0, len(address), 8))
    host = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _unix(owners: dict[str, int]) -> Iterable[OpenSocket]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[3] == _LISTENING_UNIX and fields[6] in owners:
            yield OpenSocket(owners[fields[6]], _command(owners[fields[6]]), path=fields[7])


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def payload(chance: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return bytes that no well-behaved peer sends."""
    match chance.randrange(6):
        case 0:
            return chance.randbytes(chance.choice((1, 4, 20, 200, 4096, 70_000)))
        case 1:
            return mutated(chance, chance.choice(samples))
        case 2:
            return _frame(chance)
        case 3:  # announces much, sends little
            lengths = [chance.choice((0, 38, 1 << 20, (1 << 31) - 1)) for _ in "ab"]
            return chance.choice(_MAGICS) + struct.pack("!IQI", *lengths, 0)
        case 4:
            return b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + chance.randbytes(60_000).hex().encode() + b"\r\n"
        case _:
            return b"POST /api/jobs HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + chance.randbytes(100)


def mutated(chance: random.Random, sample: bytes) -> bytes:
    """Return a message with some bytes changed, dropped or doubled."""
    found = bytearray(sample)
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(found) or 1)
        match chance.randrange(3):
            case 0 if found:
                found[place % len(found)] = chance.randrange(256)
            case 1:
                del found[place : place + chance.randint(1, 9)]
            case _:
                found[place:place] = found[place : place + chance.randint(1, 50)]
    return bytes(found)


def _frame(chance: random.Random) -> bytes:
    """Return a well-formed frame whose content is nonsense."""
    value: Any = chance.choice(([], {}, None, -1, 10**30, "x" * 3000, [[[[]]]], {"rank": []}, True))
    header = {
        "type": chance.choice((1, 2, 3, 4, 6, 7, 9, 99, -1, "hello")),
        "generation": chance.choice((0, 1, 2, -1, 10**20)),
        "body": chance.choice(({}, {"token": value, "rank": value, "host": value}, {"group": value, "members": value})),
        "token": value,
    }
    return FrameFormat(chance.choice(_MAGICS)).pack(header)


def visit(listener: OpenSocket, data: bytes, chance: random.Random) -> str:
    """Connect, send, and leave in one of several ways; return what became of it."""
    try:
        with listener.connect() as stream:
            half = chance.randint(0, len(data))
            stream.sendall(data[:half])
            if chance.random() < 0.1:
                time.sleep(0.05)
            stream.sendall(data[half:])
            if chance.random() < 0.3:
                with suppress(TimeoutError):
                    stream.recv(4096)
            if chance.random() < 0.3:  # a reset in place of an orderly end
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except (ConnectionError, TimeoutError):
        return "cut off"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "error")
    return "sent"


def open_silently(listener: OpenSocket, count: int) -> list[socket.socket]:
    """Open connections that say nothing."""
    found: list[socket.socket] = []
    with suppress(OSError):
        found.extend(listener.connect() for _ in range(count))
    return found


def used_by(pid: int) -> tuple[int, int]:
    """Return a process's resident memory in bytes and its number of descriptors."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return 0, 0


def sample_requests(token: str, job: int) -> list[bytes]:
    """Return requests as workers and people send them, with a token that is right."""
    bodies = [
        ("POST", f"/api/jobs/{job}/report", {"protocol": PROTOCOL, "generation": 1, "rank": 0, "state": "training"}),
        ("PUT", f"/api/jobs/{job}/plan", {"protocol": PROTOCOL, "generation": 1, "content": {"micro": [[10**40]]}}),
        ("POST", "/api/jobs", {"name": "x", "script": "a.py", "code_archive": "0" * 64, "devices": "1"}),
        ("PATCH", f"/api/jobs/{job}", {"priority": 10**30}),
        ("GET", "/api/jobs?limit=99999999999999", {}),
    ]
    return [_request(method, path, token, body) for method, path, body in bodies]


def _request(method: str, path: str, token: str, body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text
