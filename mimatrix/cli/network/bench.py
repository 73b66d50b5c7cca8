"""`mimatrix bench`: measure our collectives next to Gloo, MPI and NCCL, in the same processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from mimatrix.cli.output import plain_console, print_json, progress
from mimatrix.core.errors import UserError, WorldError, nearest
from mimatrix.core.units import format_bytes, format_rate, format_seconds, parse_bytes
from mimatrix.processes.ports import free_port

_COLLECTIVES = {"allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather"}
_PEERS = ("gloo", "mpi", "nccl")
"""NCCL needs a GPU for each rank; all tensors then lie on GPUs."""
_MAX_WORLD = 64


def bench(
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help="allreduce, reducescatter or allgather.")],
    world: Annotated[int, typer.Option(metavar="N", help="Number of ranks on this machine.")] = 2,
    size: Annotated[
        str, typer.Option("--bytes", metavar="SIZES", help="4MiB; 4KiB,1MiB; or 4KiB..64MiB in steps of 4.")
    ] = "4KiB..64MiB",
    against: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Baselines to compare with, comma-separated: gloo, mpi, nccl, or `none`."),
    ] = "gloo",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Approximate duration of each size.")] = 3.0,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="Print a row for every algorithm that the tuner tries.")
    ] = False,
    algorithms: Annotated[
        str,
        typer.Option(metavar="NAMES", help='Also measure these, comma-separated: "send_recv ring,windows gdraa/8".'),
    ] = "",
    shares: Annotated[
        str,
        typer.Option(
            metavar="SHARES",
            help="What each rank owns of a reducescatter or allgather, e.g. 0.6,0.25,0.15.",
            show_default="equal",
        ),
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the transports, and why the tuner chose what it chose.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of rows.")] = False,
) -> None:
    """Measure collectives: medians of interleaved turns, their spread, and whether the results are right.

    Under `mimatrix lab run` or torchrun each process is one rank and --world is not used.

    Example: mimatrix bench allreduce --world 2 --bytes 4MiB,64MiB --against gloo,mpi
    """
    if collective not in _COLLECTIVES:
        raise UserError(f'unknown collective "{collective}"{nearest(collective, _COLLECTIVES)}')
    if not 0 < seconds < 3600:
        raise UserError(f"{seconds} s cannot be measured; use for example --seconds 3")
    under_a_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not under_a_launcher and not 2 <= world <= _MAX_WORLD:
        raise UserError(f"{world} ranks cannot be compared here; use --world 2 to {_MAX_WORLD}")
    request = {
        "collective": _COLLECTIVES[collective],
        "sizes": _parse_sizes(size),
        "against": _parse_baselines(against),
        "seconds": seconds,
        "candidates": candidates,
        "explain": explain,
        "choices": _parse_choices(algorithms),
        "shares": _shares(shares, collective, int(os.environ["WORLD_SIZE"]) if under_a_launcher else world),
    }
    found = _run_one_rank(request) if under_a_launcher else _run_all_ranks(request, world)
    if found is None:
        return
    if as_json:
        print_json(found["rows"])
        for line in (*found["transports"], *_explain_choices(found["why"])):
            typer.echo(line, err=True)
    else:
        _print(found, shares)


def _parse_sizes(text: str) -> list[int]:
    first, _, last = text.partition("..")
    if not last:
        sizes = [parse_bytes(part) for part in text.split(",")]
    else:
        sizes, limit = [parse_bytes(first)], parse_bytes(last)
        if limit < sizes[0]:
            raise UserError(f'"{text}" ends before it starts; write the smaller size first')
        while sizes[-1] * 4 <= limit:
            sizes.append(sizes[-1] * 4)
    if any(size < 4 for size in sizes):
        raise UserError(f'"{text}" holds a size below one element; use 4B or more')
    return sizes


def _parse_choices(text: str) -> list[str]:
    from mimatrix.collectives import find

    choices = [choice.strip() for choice in text.split(",") if choice.strip()]
    for choice in choices:
        if re.fullmatch(r"c10d( padded| lists)?", choice):
            continue
        words = re.fullmatch(r"(windows|send_recv) (\w+)(/[1-9]\d*)?", choice)
        if not words:
            raise UserError(
                f'"{choice}" does not name a transport and an algorithm; write for example "send_recv ring", '
                '"windows gdraa/8" or "c10d padded"'
            )
        find(words[2])
    return choices


def _shares(text: str, collective: str, world: int) -> list[float]:
    if not text:
        return []
    from mimatrix.collectives import Shares

    if collective == "allreduce":
        raise UserError("ranks do not own parts of an all-reduce; use --shares with reducescatter or allgather")
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f'invalid shares "{text}"; write for example 0.6,0.25,0.15') from None
    if len(weights) != world:
        raise UserError(f"got {len(weights)} shares for {world} ranks; give one for each rank")
    return list(Shares.of(weights).fractions)


def _parse_baselines(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in _PEERS:
            raise UserError(f'unknown baseline "{name}"{nearest(name, [*_PEERS, "none"])}')
    return names


def _run_all_ranks(request: dict[str, Any], world: int) -> dict[str, Any]:
    """Start all ranks here and read the result of rank 0."""
    command = [sys.executable, "-m", "mimatrix.comm.bench_rank", json.dumps(request)]
    settings = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": str(world),
    }
    settings.setdefault("OMP_NUM_THREADS", "1")
    if "mpi" in request["against"]:
        starter = [_mpiexec(), "--allow-run-as-root", "--oversubscribe", "-n", str(world)]
        starts = [(starter + command, settings)]
    else:
        starts = [(command, settings | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)]
    with _start_processes(starts) as processes, progress(f"measuring among {world} ranks") as show:
        found = _read(processes[0], show, len(request["sizes"]))
        for process in processes[1:]:
            process.wait(timeout=60)
    return found


def _run_one_rank(request: dict[str, Any]) -> dict[str, Any] | None:
    """Run one rank of a job that another launcher started; rank 0 has the answer."""
    command = [sys.executable, "-m", "mimatrix.comm.bench_rank", json.dumps(request)]
    with _start_processes([(command, dict(os.environ))]) as (process,):
        if os.environ["RANK"] == "0":
            return _read(process, lambda _: None, 1)
        if process.wait():
            raise WorldError("this rank failed; see its output above")
        return None


@contextmanager
def _start_processes(starts: list[tuple[list[str], dict[str, str]]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes and end them with this context. Only the output of the first one is read."""
    processes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for number, (command, settings) in enumerate(starts):
            output = subprocess.DEVNULL if number else subprocess.PIPE
            processes.append(subprocess.Popen(command, env=settings, stdout=output, text=True))  # noqa: S603 (our own)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()


def _read(process: "subprocess.Popen[str]", show: Callable[[float], None], steps: int) -> dict[str, Any]:
    assert process.stdout
    done = 0
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        said: dict[str, Any] = json.loads(line)
        if "rows" in said:
            return said
        show(done / steps)
        done += 1
    raise WorldError(f"the measurement failed (exit code {process.wait(timeout=30)}); see its output above")


def _mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if not found:
        raise UserError("there is no mpiexec here; install openmpi and mpi4py, or leave mpi out of --against")
    return found


def _print(found: dict[str, Any], shares: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = found["rows"]
    title = f"{rows[0]['collective']}, float32, sum, {rows[0]['world']} ranks{f', shares {shares}' if shares else ''}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("size")
    table.add_column("implementation", no_wrap=True)
    for heading in ("time", "±", "algbw", "busbw", "#wrong", "predicted"):
        table.add_column(heading, justify="right")
    for row in rows:
        predicted = row["predicted_s"]
        table.add_row(
            format_bytes(row["bytes"]),
            row["who"],
            format_seconds(row["median_s"]),
            format_seconds(row["spread_s"] / 2),
            format_rate(row["algbw"]),
            format_rate(row["busbw"]),
            str(row["wrong"]),
            format_seconds(predicted) if predicted else "",
        )
    console = plain_console()
    console.print(table)
    console.print("time: median of interleaved turns; ±: half the distance of the quartiles", style="dim")
    for line in (*found["transports"], *_explain_choices(found["why"])):
        console.print(line)


def _explain_choices(why: dict[str, dict[str, float]]) -> Iterator[str]:
    for size_class, times in why.items():
        ranked = sorted(times.items(), key=lambda pair: pair[1])
        others = ", ".join(f"{name} {format_seconds(took)}" for name, took in ranked[1:])
        yield f"{size_class}: {ranked[0][0]} with {format_seconds(ranked[0][1])}; {others or 'nothing else to try'}"
