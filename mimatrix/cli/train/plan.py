"""`mimatrix plan`: who would do how much, on paper."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import check_file, plain_console, print_json, progress, save_picture, write_json
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mimatrix.planner.model.plan import Plan
    from mimatrix.planner.model.profile import Communication, Measurements, Profile
    from mimatrix.planner.what_if import Addition

_MOST_ROWS = 48


def plan(
    profiles: Annotated[list[Path], typer.Option(help="What `mimatrix profile` stored; may be given several times.")],
    global_batch: Annotated[int, typer.Option(help="Samples of a step, on all devices together.")],
    cluster: Annotated[
        str, typer.Option(help="A TOML file, or a family such as star:8; without, the ranks as they were measured.")
    ] = "",
    stage: Annotated[str, typer.Option(help="auto (the cheapest that fits), or 0, 1, 2, 3.")] = "auto",
    add: Annotated[
        list[str] | None, typer.Option(help='What if there were more: a kind and a number, as in "RTX 3090:2".')
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out-slow/--keep-all", help="Whether devices that slow the job down may be left out."),
    ] = True,
    picture: Annotated[Path | None, typer.Option(help="Draw the step of every device into this PNG or SVG.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help='Store the plan here, for init(plan="...").')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Share out a global batch so that all devices finish together, on paper: no device is needed.

    Stage, batches, micro-steps and shares are chosen from stored measurements, each with its reason.

    Example: mimatrix plan --cluster lab.toml --profiles profile.json --global-batch 512 --add "RTX 3090:2"
    """
    if picture:
        check_file(picture, (".png", ".svg", ".pdf"))
    if output:
        check_file(output, (".json",))
    stages = _stages(stage)
    with progress("planning"):
        from mimatrix.planner.what_if import Addition

        additions = [Addition.parse(text) for text in add or []]
        found = _read(profiles)
        now = _devices(found, cluster, [])
        then = _devices(found, cluster, additions) if additions else now
        before = _made(found, now, global_batch, stages, leave_out) if additions else None
        made = _made(found, then, global_batch, stages, leave_out)
    if picture:
        _draw(made, then, picture, found.equal_counts)
    fields = made.to_json() | ({"now": before.to_json(), "added": list(then.said)} if before else {})
    if output:
        write_json(fields, output)
    if as_json:
        print_json(fields)
        return
    console = plain_console()
    _print(console, made, then.title)
    if before:
        _print_beside(console, before, made, then.said)
    for what, file in (("plan", output), ("picture", picture)):
        if file:
            console.print(f"{what}: {file}")


@dataclass(frozen=True, slots=True)
class _Devices:
    """The devices that a plan is made for, and what they pay for moving a model."""

    title: str
    names: tuple[str, ...]
    profiles: "tuple[Profile, ...]"
    network: "Callable[[tuple[int, ...]], Communication]"
    said: tuple[str, ...] = ()
    """How devices were added."""


def _stages(text: str) -> tuple[int, ...]:
    if text == "auto":
        return (0, 1, 2, 3)
    if text not in ("0", "1", "2", "3"):
        raise UserError(f'unknown stage "{text}"; use auto, 0, 1, 2 or 3')
    return (int(text),)


def _read(files: list[Path]) -> "Measurements":
    from mimatrix.planner.device_matching import joined
    from mimatrix.planner.model.profile import Measurements

    found = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f'there is no file "{file}"; make it with `mimatrix profile -o {file} script.py`') from None
        except (OSError, ValueError) as error:
            raise UserError(f'"{file}" cannot be read ({error}); give what `mimatrix profile` stored') from None
        found.append((str(file), Measurements.from_text(text, str(file))))
    return joined(found)


def _devices(found: "Measurements", cluster: str, additions: "list[Addition]") -> _Devices:
    return _described(found, cluster, additions) if cluster else _measured(found, additions)


def _described(found: "Measurements", word: str, additions: "list[Addition]") -> _Devices:
    """The devices of a cluster file, with what the simulator finds for its network."""
    from mimatrix.cluster import load_cluster
    from mimatrix.planner.communication import simulated
    from mimatrix.planner.device_matching import devices_of, names_of, profiles_for
    from mimatrix.planner.what_if import with_node

    cluster, said = load_cluster(word), []
    for addition in additions:
        cluster, sentence = with_node(cluster, addition)
        said.append(sentence)
    profiles = profiles_for(devices_of(cluster), found.profiles)
    size = found.model.gradient_bytes
    return _Devices(
        cluster.name, names_of(cluster), profiles, lambda members: simulated(cluster, size, members), tuple(said)
    )


def _measured(found: "Measurements", additions: "list[Addition]") -> _Devices:
    """The ranks as they were measured; more of them pay what the measured ones paid, scaled."""
    from mimatrix.cluster.model import Device
    from mimatrix.planner.device_matching import profiles_for
    from mimatrix.planner.what_if import measured_network

    ranks = len(found.profiles)
    more = [Device(addition.kind) for addition in additions for _ in range(addition.count)]
    profiles = (*found.profiles, *profiles_for(more, found.profiles))
    names = tuple(f"rank {rank} {profile.device}" for rank, profile in enumerate(profiles))
    group = f"{ranks} measured ranks" if ranks > 1 else "measured rank"
    paying = "unknown" if ranks == 1 or found.communication.is_free else "scaled from theirs"
    said = tuple(
        f"{addition.count} x {addition.kind} added to the {group}, communication {paying}" for addition in additions
    )
    return _Devices("the measured ranks", names, profiles, measured_network(found.communication, ranks), said)


def _made(
    found: "Measurements", devices: _Devices, global_batch: int, stages: tuple[int, ...], leave_out: bool
) -> "Plan":
    from mimatrix.planner.planner import Problem, make_plan

    made = make_plan(
        Problem(
            global_batch,
            found.model,
            devices.profiles,
            devices.names,
            devices.network,
            stages=stages,
            equal_counts=found.equal_counts,
            one_micro_step=found.equal_counts,
            may_leave_out=leave_out,
        )
    )
    kinds = {name: profile.device for name, profile in zip(devices.names, devices.profiles, strict=True)}
    made = replace(made, parts=tuple(replace(part, device=kinds[part.name]) for part in made.parts))
    return made if made.communication_known else _warning(made, devices)


def _warning(made: "Plan", devices: _Devices) -> "Plan":
    """The plan with a sentence before its reasons: what ranks pay for moving data is not known."""
    reason = devices.network(tuple(range(len(made.parts)))).reason
    unknown = (
        f"communication is unknown{f' ({reason})' if reason else ''} and counted as nothing, so steps will take "
        f"longer; describe the network: --cluster lab.toml"
    )
    return replace(made, reasons=(unknown, *made.reasons))


def _draw(made: "Plan", devices: _Devices, picture: Path, equal_counts: bool) -> None:
    from mimatrix.planner.present.drawing import draw_plan

    by_name = dict(zip(devices.names, devices.profiles, strict=True))
    profiles = [by_name[part.name] for part in made.parts]
    save_picture(draw_plan(made, profiles, devices.title, equal_counts), picture)


def _print(console: "Console", made: "Plan", title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mimatrix.planner.present.rows import plan_rows, step_text

    heading = f"{made.global_batch} samples a step on {title}, stage {made.stage}"
    table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("device", overflow="fold")
    for name in ("batch", "micro-steps", "share", "busy", "idle", "memory of room"):
        table.add_column(name, justify="right")
    rows = plan_rows(made)
    for row in rows[:_MOST_ROWS]:
        table.add_row(
            row.device,
            str(row.batch),
            row.micro_steps,
            f"{row.share:.1%}",
            format_seconds(row.busy_s),
            f"{row.idle_s / made.step_s:.1%}",
            f"{_size(row.memory_bytes)} of {_size(row.room_bytes)}",
        )
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"... and {len(rows) - _MOST_ROWS} more (--json has all)")
    console.print(step_text(made))
    for reason in made.reasons:
        console.print(f"- {reason}")
    for each in made.left_out:
        console.print(f"- left out: {each.name}: {each.reason}")


def _print_beside(console: "Console", before: "Plan", made: "Plan", said: tuple[str, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mimatrix.planner.present.rows import compared

    table = Table("", "now", "then", title="Now and then", title_justify="left", box=SIMPLE_HEAD, padding=0)
    for row in compared(before, made):
        table.add_row(*row)
    console.print(table)
    for sentence in said:
        console.print(f"- {sentence}")


def _size(count: int) -> str:
    """Decimal, so that sizes below one another can be compared."""
    return format_bytes(count + 0.5 if count % 1024 == 0 else count)
