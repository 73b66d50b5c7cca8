"""One NVIDIA GPU that plays a lab of unlike GPUs on several hosts: each rank gets a part of it under CUDA MPS.

A part is a percentage of the multiprocessors and perhaps a memory limit, or only a CPU. The MPS daemon is our own: it
has its own folder, and it is stopped and the folder removed however this process ends.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mimatrix.api.torchrun_env import Place, torchrun_variables
from mimatrix.core.environment import HOST, JOB_SECRET
from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.exit_codes import TIMED_OUT
from mimatrix.core.units import parse_bytes
from mimatrix.processes.group import Command, run_process_group, signal_group, start_guard
from mimatrix.processes.group_exit import GroupExit
from mimatrix.processes.ports import free_port

_ADDRESS = "127.0.0.1"
_ONE_HOST = "lab"
_CONTROL = "nvidia-cuda-mps-control"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MPS = "CUDA_MPS_"
_GONE_S = 10.0
_MIB, _GIB = 2**20, 2**30
_STOP = """
read -r _
echo quit | timeout "$2" "$3"
[ $? -ne 124 ] || kill -s KILL "$(cat "$1/$3.pid")"
rm -rf "$1"
"""
"""Waits for the end of its input, which comes when we ask for it or die, then stops the daemon and removes its folder.
124 is the exit code of `timeout`."""


@dataclass(frozen=True, slots=True)
class GpuPart:
    """What one rank gets: a percentage of a GPU and perhaps a memory limit, or only a CPU; and the host it plays on."""

    percent: int | None
    """None for a rank without a GPU."""
    memory_bytes: int | None = None
    host: str = _ONE_HOST

    @property
    def is_cpu(self) -> bool:
        """Tell whether this rank has no GPU."""
        return self.percent is None


@dataclass(frozen=True, slots=True)
class RankOutput:
    """How a rank ended and what it printed."""

    returncode: int
    """Negative if a signal ended it; `TIMED_OUT` if it was killed at the deadline."""
    stdout: str
    stderr: str


def parse_parts(text: str, hosts: str = "") -> tuple[GpuPart, ...]:
    """Read the parts of all ranks.

    Args:
        text: One part for each rank, as in `60:40GB,25,cpu`: percent and memory, percent alone, or a CPU.
        hosts: The host of each rank, as in `a,a,b`; all are on one host if empty.

    Raises:
        UserError: A part is invalid, or there is not one host for each part.
    """
    parts = [word.strip() for word in text.split(",")]
    names = [word.strip() for word in hosts.split(",")] if hosts else [_ONE_HOST] * len(parts)
    if len(names) != len(parts) or not all(names):
        raise UserError(
            f'"{hosts}" gives {sum(map(bool, names))} names of hosts, and there are {len(parts)} parts; '
            "name one for each part, as in --parts 60,25,10 --hosts a,a,b"
        )
    return tuple(_parse_part(part, host) for part, host in zip(parts, names, strict=True))


def _parse_part(text: str, host: str) -> GpuPart:
    if text.lower() == "cpu":
        return GpuPart(None, host=host)
    percent, colon, memory = text.partition(":")
    if not percent.isdecimal() or not 1 <= int(percent) <= 100:
        raise UserError(
            f'"{text}" is not a part of a GPU; write a whole percentage from 1 to 100, with a memory limit if wanted '
            "(60:40GB), or cpu"
        )
    size = parse_bytes(memory) if colon else None
    if size is not None and size < _MIB:
        raise UserError(f'the memory limit of part "{text}" is below 1MiB; write for example {percent}:8GB')
    return GpuPart(int(percent), size, host)


def gpu_environment(
    parts: Sequence[GpuPart], rank: int, *, port: int, gpus: int = 1, outside: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of one rank: torchrun's, its part of the GPU, its host, and how ranks reach each other.

    Args:
        parts: The parts of all ranks.
        rank: Which rank.
        port: The port on which rank 0 opens the store.
        gpus: How many GPUs ranks share; a rank uses number `LOCAL_RANK` modulo `gpus`.
        outside: The environment that the rank inherits.
    """
    outside = {} if outside is None else outside
    part = parts[rank]
    neighbours = [other for other, its in enumerate(parts) if its.host == part.host]
    hosts = list(dict.fromkeys(its.host for its in parts))
    place = Place(
        rank,
        len(parts),
        neighbours.index(rank),
        len(neighbours),
        _ADDRESS,
        port,
        node=hosts.index(part.host),
        nodes=len(hosts),
    )
    return {
        **torchrun_variables(place, run_id=f"lab-gpu-{port}", restarts=0, max_restarts=0),
        **_device_variables(part, gpus, outside),
        HOST.name: part.host,
        # NCCL refuses two ranks of one host on one GPU, so each rank is a host of its own for NCCL.
        "NCCL_HOSTID": f"{part.host}-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": outside.get("OMP_NUM_THREADS", "1"),
    }


def _device_variables(part: GpuPart, gpus: int, outside: Mapping[str, str]) -> dict[str, str]:
    if part.is_cpu:
        return {_VISIBLE: ""}
    # The daemon renumbers the GPUs that it sees from 0, so a rank that repeated our numbers would see others or none.
    visible = outside.get(_VISIBLE, "").split(",")
    devices = visible[:gpus] if visible[0].startswith("GPU-") else map(str, range(gpus))
    told = {_VISIBLE: ",".join(devices), f"{_MPS}ACTIVE_THREAD_PERCENTAGE": str(part.percent)}
    if part.memory_bytes is not None:
        limit = _mps_size(part.memory_bytes)
        told[f"{_MPS}PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{gpu}={limit}" for gpu in range(gpus))
    return told


def _mps_size(size: int) -> str:
    """Return a size as MPS reads it, where G is GiB and M is MiB."""
    return f"{size // _GIB}G" if size % _GIB == 0 else f"{size // _MIB}M"


@contextmanager
def mps_daemon(*, start_s: float = 30.0, quit_s: float = 30.0) -> Iterator[dict[str, str]]:
    """Start a CUDA MPS daemon of our own and yield the variables by which ranks find it; stop it at the end.

    It is stopped and its folder removed also when this process is killed.

    Args:
        start_s: How long the daemon may take to start.
        quit_s: How long it may take to quit, which it does once its clients have ended; it is killed then.

    Raises:
        UserError: This machine has no CUDA MPS.
        WorldError: The daemon did not start.
    """
    _check_mps()
    folder = Path(tempfile.mkdtemp(prefix="mimatrix-mps-"))
    variables = {f"{_MPS}PIPE_DIRECTORY": str(folder), f"{_MPS}LOG_DIRECTORY": str(folder)}
    environ = _without_mps(os.environ) | variables
    guard = subprocess.Popen(  # noqa: S603 (the words are ours)
        ["sh", "-c", _STOP, "guard", str(folder), f"{quit_s:g}", _CONTROL],  # noqa: S607
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pid = None
    try:
        pid = _start_daemon(folder, environ, start_s)
        yield variables
    finally:
        _end_guard(guard, quit_s + _GONE_S)
        shutil.rmtree(folder, ignore_errors=True)
        _wait_until_gone(pid)


def run_gpu(
    parts: Sequence[GpuPart],
    words: Sequence[str],
    *,
    gpus: int = 1,
    env: Mapping[str, str] | None = None,
    daemon: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
    timeout_s: float | None = None,
) -> GroupExit:
    """Run `words` once for every part, pass on what ranks print with their labels, and wait for all.

    Args:
        parts: The parts of all ranks.
        words: The command of every rank.
        gpus: How many GPUs ranks share; a rank uses number `LOCAL_RANK` modulo `gpus`.
        env: More variables for every rank; they replace others.
        daemon: What `mps_daemon` yielded, if one runs already; one is started for this run otherwise.
        grace_s: How long the other ranks may continue when one has failed.
        timeout_s: Stop everything after this time.
    """
    with _environments(parts, words, gpus, env, daemon) as environments:
        commands = [
            Command(f"{rank} {part.host}", tuple(words), environment)
            for rank, (part, environment) in enumerate(zip(parts, environments, strict=True))
        ]
        return run_process_group(commands, sys.stdout.buffer, sys.stderr.buffer, grace_s=grace_s, timeout_s=timeout_s)


def collect_gpu(
    parts: Sequence[GpuPart],
    words: Sequence[str],
    *,
    timeout_s: float,
    gpus: int = 1,
    env: Mapping[str, str] | None = None,
    daemon: Mapping[str, str] | None = None,
) -> list[RankOutput]:
    """Run `words` once for every part and return what each rank printed; no rank is alive afterwards.

    A rank that fails does not end the others, so that they can be seen to notice it.

    Args:
        parts: The parts of all ranks.
        words: The command of every rank.
        timeout_s: Kill the ranks that still run after this time; their return code is `TIMED_OUT`.
        gpus: How many GPUs ranks share; a rank uses number `LOCAL_RANK` modulo `gpus`.
        env: More variables for every rank; they replace others.
        daemon: What `mps_daemon` yielded, if one runs already; one is started for this run otherwise.
    """
    with _environments(parts, words, gpus, env, daemon) as environments, ExitStack() as stack:
        # Files, not pipes: a rank never waits until its output is read.
        files = [
            (stack.enter_context(tempfile.TemporaryFile()), stack.enter_context(tempfile.TemporaryFile()))
            for _ in parts
        ]
        codes = _run_into_files(words, environments, files, timeout_s)
        return [RankOutput(code, _text(out), _text(err)) for code, (out, err) in zip(codes, files, strict=True)]


@contextmanager
def _environments(
    parts: Sequence[GpuPart],
    words: Sequence[str],
    gpus: int,
    more: Mapping[str, str] | None,
    daemon: Mapping[str, str] | None,
) -> Iterator[list[dict[str, str]]]:
    """Yield the whole environment of each rank while an MPS daemon runs, if any of them needs one."""
    if not words or not shutil.which(words[0]):
        command = f'there is no command "{words[0]}"' if words else "no command was given"
        raise UserError(f"{command}; write it as `mimatrix lab gpu --parts 60,25,10 -- python train.py`")
    if gpus < 1:
        raise UserError(f"ranks need at least 1 GPU to share, got {gpus}; write for example --gpus 1")
    with ExitStack() as stack:
        if daemon is None and not all(part.is_cpu for part in parts):
            daemon = stack.enter_context(mps_daemon())
        port, secret = free_port(_ADDRESS), secrets.token_hex(32)
        yield [
            {
                **_without_mps(os.environ),
                **(daemon or {}),
                **gpu_environment(parts, rank, port=port, gpus=gpus, outside=os.environ),
                JOB_SECRET.name: secret,
                **(more or {}),
            }
            for rank in range(len(parts))
        ]


def _run_into_files(
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    files: Sequence[tuple[IO[bytes], IO[bytes]]],
    timeout_s: float,
) -> list[int]:
    """Run one process for each environment, its output in two files, and return their exit codes."""
    deadline = time.monotonic() + timeout_s
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for environment, (out, err) in zip(environments, files, strict=True):
            rank = subprocess.Popen(  # noqa: S603 (running what the person asks for is the purpose)
                words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            ranks.append(rank)
            stack.callback(rank.wait)
            stack.callback(signal_group, rank.pid, signal.SIGKILL)
        # Kills the ranks if we die ourselves.
        stack.callback(_kill, start_guard([rank.pid for rank in ranks]))
        return [_wait(rank, deadline) for rank in ranks]


def _text(file: IO[bytes]) -> str:
    """Return all that was written to a file, also by other processes."""
    file.seek(0)
    return file.read().decode(errors="replace")


def _wait(rank: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return rank.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return TIMED_OUT


def _kill(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()
    guard.communicate()


def _check_mps() -> None:
    if not shutil.which(_CONTROL):
        raise UserError(
            f"this machine has no CUDA MPS ({_CONTROL} is not on the PATH); run it on a machine with an NVIDIA GPU"
        )
    if os.environ.get(_VISIBLE) == "":
        raise UserError(f"{_VISIBLE} is empty, so that ranks see no GPU; unset it")


def _start_daemon(folder: Path, environ: Mapping[str, str], timeout_s: float) -> int | None:
    """Start the daemon, which puts itself into the background; return its process, if it says which one that is."""
    log = folder / "start.log"
    try:
        # A file, not a pipe: the daemon may keep it open.
        with log.open("wb") as output:
            words = [_CONTROL, "-d"]
            subprocess.run(  # noqa: S603
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                check=True,
            )
    except (subprocess.SubprocessError, OSError) as error:
        output_text = " ".join(log.read_text(errors="replace").split())
        raise WorldError(
            f"CUDA MPS did not start ({output_text or error}); see whether `nvidia-smi` shows the GPU"
        ) from error
    with suppress(OSError, ValueError):
        return int((folder / f"{_CONTROL}.pid").read_text())
    return None


def _end_guard(guard: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Have the guard stop the daemon, and wait for that until its deadline has passed."""
    try:
        guard.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        signal_group(guard.pid, signal.SIGKILL)
        guard.communicate()


def _wait_until_gone(pid: int | None) -> None:
    """Wait until the daemon has ended: the next one must not meet it."""
    deadline = time.monotonic() + _GONE_S
    while pid is not None and _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended but that its parent has not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _without_mps(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of another MPS daemon and its limits."""
    return {name: value for name, value in environ.items() if not name.startswith(_MPS)}
