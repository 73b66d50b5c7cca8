"""`mimatrix submit`: upload a script with its directory, and queue it as a job."""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mimatrix.cli.client import Json, connected
from mimatrix.cli.output import plain_console, print_json, say
from mimatrix.core.errors import MiMatrixError, UserError
from mimatrix.core.units import parse_duration

if TYPE_CHECKING:
    from mimatrix.api.client import Client
    from mimatrix.api.models import NodeStatus, Submission

_MOST_KINDS = 10


def submit(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A .py file, or a job as a .toml file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after --.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job.", show_default="the script's name")] = "",
    devices: Annotated[str, typer.Option(metavar="DEVICES", help="4, a100:2,v100:4, 2..8 or all.")] = "",
    priority: Annotated[
        int | None, typer.Option(min=0, max=100, metavar="0-100", help="Larger values come first.", show_default="50")
    ] = None,
    preemptible: Annotated[
        bool,
        typer.Option(
            "--preemptible", help="The job may be stopped for others; it saves a checkpoint and is queued again."
        ),
    ] = False,
    max_time: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit, e.g. 90s or 1h30m; the job is stopped when it is reached.")
    ] = "",
    groups: Annotated[
        str,
        typer.Option(
            metavar="GROUPS",
            help='Groups of ranks, e.g. 0,1/2/3, for mode="hybrid"; the other groups survive the loss of one.',
        ),
    ] = "",
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment variable of the job; may be repeated.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Upload this file as well; may be repeated.")
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            metavar="N",
            help="Restarts when a worker is lost; with --groups, of its group alone.",
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print whether the job would start or wait, without submitting it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a script to the job server. Its directory is uploaded as it is now.

    Example: mimatrix submit --devices 2 train.py -- --lr 0.1
    """
    from mimatrix.api.models import MAX_CODE_ARCHIVE_BYTES
    from mimatrix.cli.jobs.code_archive import archive

    given = _given_options(name, devices, priority, preemptible, max_time, env or [], retries, groups)
    path, given = _merge_job_file(script, given, arguments or [])
    if said := given.pop("groups", ""):
        given = _add_groups(said, given)
    with connected() as client, TemporaryDirectory(prefix="mimatrix-submit-") as folder:
        packed = Path(folder) / "code.tar.gz"
        digest = archive(path.parent, packed, MAX_CODE_ARCHIVE_BYTES, path.name, file or [], say)
        job = _build_submission({**given, "script": path.name, "code_archive": digest})
        _warn_of_unknown_kinds(job.devices, _nodes_of(client))
        if dry_run:
            would = client.dry_run(job)
            print_json(would.model_dump(mode="json")) if as_json else plain_console().print(
                f"it would {'start' if would.starts else 'wait'}: {would.reason}"
            )
            return
        if not client.has_code_archive(digest):
            client.upload(digest, packed)
        made = client.submit(job)
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    plain_console().print(f"job {made.id} ({made.name}) is {made.state}; follow it: mimatrix logs -f {made.id}")


def _given_options(
    name: str,
    devices: str,
    priority: int | None,
    preemptible: bool,
    max_time: str,
    env: list[str],
    retries: int,
    groups: str,
) -> dict[str, Any]:
    """Return the options that the command line gives, without defaults."""
    found: dict[str, Any] = {"name": name, "devices": devices, "priority": priority, "groups": groups}
    found |= {"preemptible": preemptible or None, "max_restarts": retries or None}
    found["max_time_s"] = parse_duration(max_time) if max_time else None
    found["environment"] = dict(_parse_variable(text) for text in env) or None
    return {key: value for key, value in found.items() if value not in (None, "")}


def _add_groups(text: str, given: dict[str, Any]) -> dict[str, Any]:
    """Add the groups as the server takes them, and a device for each rank unless devices are given."""
    from mimatrix.launch import parse_groups
    from mimatrix.scheduler import ResourceRequest

    ranks = len(re.findall(r"\d+", text))
    found = parse_groups(text, ranks)
    devices = given.get("devices") or str(ranks)
    wanted = ResourceRequest.parse(devices)
    if wanted.least != ranks or any(part.least != part.most for part in wanted.parts):
        raise UserError(f"--groups {text} has {ranks} ranks, and --devices is {devices}; give as many of both")
    return {**given, "devices": devices, "groups": found}


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UserError(f'"{text}" is not a variable; write --env NAME=VALUE')
    return name, value


def _merge_job_file(script: str, given: dict[str, Any], arguments: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return the script's path and the options; those of the command line win over those of a job file."""
    path = Path(script)
    if path.suffix == ".toml":
        from mimatrix.cli.jobs.job_file import read_job

        path, said = read_job(path)
        given = {**said, **given}
    if not path.is_file():
        problem = f'"{path}" is a directory' if path.is_dir() else f'there is no "{path}"'
        raise UserError(f"{problem}; give the path of a script, or of a .toml file that names one")
    if arguments:
        given["arguments"] = tuple(arguments)
    # Only those characters of the script's name that a job's name may have.
    name = re.sub(r"[^A-Za-z0-9._ -]+|^[._ -]+", "", path.stem)[:100]
    return path, {"name": name or "job", **given}


def _build_submission(given: dict[str, Any]) -> "Submission":
    from pydantic import ValidationError

    from mimatrix.api.models import Submission

    try:
        return Submission(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place, said = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
        raise UserError(f"{place}: {said}") from None


def _nodes_of(client: "Client") -> "Sequence[NodeStatus]":
    """Return the nodes, or none if they cannot be listed: a warning depends on them, and the job does not."""
    try:
        return client.nodes()
    except (MiMatrixError, ValueError):
        return ()


def _warn_of_unknown_kinds(devices: str, nodes: "Sequence[NodeStatus]") -> None:
    """Warn of kinds that no node has: such a job waits, since nodes may be added, but mostly a name is misspelt."""
    from mimatrix.core.device_kinds import match_kind
    from mimatrix.core.resources import ResourceRequest

    there = sorted({device.kind for node in nodes for device in node.devices})
    strange = [
        part.kind for part in ResourceRequest.parse(devices).parts if part.kind and not match_kind(part.kind, there)
    ]
    if there and strange:
        more = f" and {len(there) - _MOST_KINDS} more" if len(there) > _MOST_KINDS else ""
        known = ", ".join(there[:_MOST_KINDS])
        say(
            f"no node has a device of the kind {' or '.join(strange)}, so it will wait for one; there are {known}{more}"
        )
