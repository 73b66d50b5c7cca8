"""`mimatrix plan`: plan a training run from stored measurements, without any device."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import check_file, plain_console, print_json, progress, save_picture, write_json
from mimatrix.core.errors import UserError
from mimatrix.core.text import spell_bytes
from mimatrix.core.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from mimatrix.planner.model.plan import Plan
    from mimatrix.planner.model.profile import Measurements
    from mimatrix.planner.what_if import Scenario

_MAX_ROWS = 48


def plan(
    profiles: Annotated[
        list[Path], typer.Option(metavar="FILE", help="What `mimatrix profile` stored; may be repeated.")
    ],
    global_batch: Annotated[int, typer.Option(metavar="N", help="Samples of a step, on all devices together.")],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="CLUSTER",
            help="A TOML file, or a topology such as star:8.",
            show_default="the ranks as they were measured",
        ),
    ] = "",
    stage: Annotated[
        str, typer.Option(metavar="STAGE", help="ZeRO stage 0, 1, 2 or 3, or auto: the cheapest that fits.")
    ] = "auto",
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:N", help='Devices to add, e.g. "RTX 3090:2"; may be repeated.'),
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out-slow/--keep-all", help="Whether devices that slow the job down may be left out."),
    ] = True,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step of every device into this PNG, SVG or PDF.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help='Store the plan here, for init(plan="...").')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Split a global batch so that all devices finish at the same time. No device is needed.

    Stage, batches, micro-steps and shares are chosen from stored measurements, each with its reason.

    Example: mimatrix plan --cluster lab.toml --profiles profile.json --global-batch 512 --add "RTX 3090:2"
    """
    if picture:
        check_file(picture, (".png", ".svg", ".pdf"))
    if output:
        check_file(output, (".json",))
    stages = _parse_stages(stage)
    with progress("planning"):
        from mimatrix.cluster import load_cluster
        from mimatrix.planner.what_if import Addition, scenario

        additions = [Addition.parse(text) for text in add or []]
        measurements = _read_measurements(profiles)
        described = load_cluster(cluster) if cluster else None

        def build(added: Sequence[Addition]) -> "Scenario":
            return scenario(
                measurements, described, added, global_batch=global_batch, stages=stages, may_leave_out=leave_out
            )

        after = build(additions)
        plan_before = build(()).make_plan() if additions else None
        plan_after = after.make_plan()
    if picture:
        _draw(plan_after, after, picture)
    fields = plan_after.to_json()
    if plan_before:
        fields |= {"before": plan_before.to_json(), "added": list(after.additions)}
    if output:
        write_json(fields, output)
    if as_json:
        print_json(fields)
        return
    console = plain_console()
    _print_plan(console, plan_after, after.title)
    if plan_before:
        _print_comparison(console, plan_before, plan_after, after.additions)
    for what, file in (("plan", output), ("picture", picture)):
        if file:
            console.print(f"{what}: {file}")


def _parse_stages(text: str) -> tuple[int, ...]:
    if text == "auto":
        return (0, 1, 2, 3)
    if text not in ("0", "1", "2", "3"):
        raise UserError(f'unknown stage "{text}"; use auto, 0, 1, 2 or 3')
    return (int(text),)


def _read_measurements(files: list[Path]) -> "Measurements":
    from mimatrix.planner.device_matching import join_measurements
    from mimatrix.planner.model.profile import Measurements

    measured = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f'there is no file "{file}"; make it with `mimatrix profile -o {file} script.py`') from None
        except (OSError, ValueError) as error:
            raise UserError(f'"{file}" cannot be read ({error}); give what `mimatrix profile` stored') from None
        measured.append((str(file), Measurements.from_text(text, str(file))))
    return join_measurements(measured)


def _draw(plan: "Plan", scenario: "Scenario", picture: Path) -> None:
    from mimatrix.planner.present.drawing import draw_plan

    problem = scenario.problem
    profile_of = dict(zip(problem.names, problem.profiles, strict=True))
    profiles = [profile_of[part.name] for part in plan.parts]
    save_picture(draw_plan(plan, profiles, scenario.title, problem.equal_counts), picture)


def _print_plan(console: "Console", plan: "Plan", title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mimatrix.planner.present.rows import plan_rows, summarize_step

    heading = f"{plan.global_batch} samples a step on {title}, stage {plan.stage}"
    table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("device", overflow="fold")
    for name in ("batch", "micro-steps", "share", "busy", "idle", "memory used"):
        table.add_column(name, justify="right")
    rows = plan_rows(plan)
    for row in rows[:_MAX_ROWS]:
        table.add_row(
            row.device,
            str(row.batch),
            row.micro_steps,
            f"{row.share:.1%}",
            format_seconds(row.busy_s),
            f"{row.idle_s / plan.step_s:.1%}",
            f"{spell_bytes(row.memory_bytes)} of {spell_bytes(row.room_bytes)}",
        )
    console.print(table)
    if len(rows) > _MAX_ROWS:
        console.print(f"... and {len(rows) - _MAX_ROWS} more (--json has all)")
    console.print(summarize_step(plan))
    for reason in plan.reasons:
        console.print(f"- {reason}")
    for device in plan.left_out:
        console.print(f"- left out: {device.name}: {device.reason}")


def _print_comparison(console: "Console", before: "Plan", after: "Plan", additions: tuple[str, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from mimatrix.planner.present.rows import compare_plans

    table = Table("", "before", "after", title="Before and after", title_justify="left", box=SIMPLE_HEAD, padding=0)
    for row in compare_plans(before, after):
        table.add_row(*row)
    console.print(table)
    for sentence in additions:
        console.print(f"- {sentence}")
