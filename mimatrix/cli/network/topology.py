"""`mimatrix topology`: describe a cluster by figures and a picture."""

from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import check_file, plain_console, print_json, progress, save_picture
from mimatrix.core.errors import UserError
from mimatrix.core.units import format_rate

if TYPE_CHECKING:
    from mimatrix.cluster.summary import ClusterSummary


def topology(
    cluster: Annotated[
        str,
        typer.Argument(metavar="CLUSTER", help="A TOML file, or a topology such as star:8, bigraph:4x4, fat_tree:4."),
    ],
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the cluster into this PNG or SVG.")] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the cluster as TOML, to be edited.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Describe a cluster: hops, links, bisection, oversubscribed links; and draw it.

    Example: mimatrix topology leaf_spine:4x8,oversubscription=2 --picture network.png
    """
    if toml and as_json:
        raise UserError("--toml and --json are two ways to print; choose one")
    if picture:
        check_file(picture, (".png", ".svg", ".pdf"))
    with progress("looking at the network"):
        from mimatrix.cluster import Fabric, load_cluster, write_cluster
        from mimatrix.cluster.summary import summarize

        described = load_cluster(cluster)
        found = None if toml else summarize(Fabric(described))
    if picture:
        with progress("drawing"):
            from mimatrix.cluster.drawing import draw

            save_picture(draw(described), picture)
    if found is None:
        typer.echo(write_cluster(described), nl=False)
    elif as_json:
        values = {"cluster": described.name} | asdict(found) | {"bisection_ratio": found.bisection_ratio}
        print_json(_without_infinity(values))
    else:
        _print(described.name, found, picture)


def _without_infinity(values: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: hops between devices that cannot reach one another are null."""
    return {key: None if value == inf else value for key, value in values.items()}


def _print(name: str, found: "ClusterSummary", picture: Path | None) -> None:
    from rich.table import Table

    table = Table(title=name, title_justify="left", show_header=False)
    bisection = f"at most {format_rate(found.bisection_bytes_per_s)} ({found.split})"
    rows = {
        "nodes": f"{found.nodes} with {found.devices} devices",
        "switches": str(found.switches),
        "cables": f"{found.nic_cables} to nodes, {found.trunk_cables} between switches or nodes that forward",
        "hops": f"{found.most_hops:g} at most, {found.mean_hops:.3g} on average (switches between two nodes)",
        "bisection": f"{bisection}, {found.bisection_ratio:.0%} of what the NICs could use",
    }
    for heading, text in rows.items():
        table.add_row(heading, text)
    console = plain_console()
    console.print(table)
    if found.unreachable:
        console.print(f"{found.unreachable[0]} cannot reach {found.unreachable[1]}; add a link", style="bold red")
    for narrow in found.oversubscribed[:8]:
        console.print(f"oversubscribed: {narrow.name}: {narrow.reason}")
    if len(found.oversubscribed) > 8:
        console.print(f"... and {len(found.oversubscribed) - 8} more like these (--json has all)")
    if not found.oversubscribed:
        console.print("nothing is oversubscribed")
    if picture:
        console.print(f"picture: {picture}")
