"""`mimatrix simulate` and `mimatrix algorithms`: collectives on networks, before anything is bought or run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mimatrix.cli.output import check_file, plain_console, print_json, progress, save_picture, write_json
from mimatrix.core.errors import UnsuitedError, UserError, nearest
from mimatrix.core.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from mimatrix.cluster import Fabric
    from mimatrix.collectives import Algorithm, Collective, FitOptions, Shares
    from mimatrix.collectives.fitting import Placement
    from mimatrix.netsim import Costs, SimulationReport, Timeline


class PlacementChoice(StrEnum):
    """Where ranks run."""

    GIVEN = "given"
    RANDOM = "random"
    HDRM = "hdrm"


class OrderChoice(StrEnum):
    """The order of ranks in a ring."""

    CLUSTER = "cluster"
    RANK = "rank"


def simulate(
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="A TOML file, or a topology such as star:8, bigraph:4x4, fat_tree:4.")
    ],
    algorithm: Annotated[
        str, typer.Option(metavar="NAMES", help="Names from `mimatrix algorithms`, comma-separated, or all.")
    ] = "all",
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Size of the message, e.g. 64MiB.")] = "64MiB",
    collective: Annotated[
        str, typer.Option(metavar="NAME", help="all_reduce, reduce_scatter, all_gather, broadcast.")
    ] = "all_reduce",
    placement: Annotated[
        PlacementChoice | None, typer.Option(help="Where ranks run.", show_default="given; hdrm has its own mapping")
    ] = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of ranks; 0 means one for each device.")] = 0,
    segments: Annotated[
        int, typer.Option(metavar="N", help="Cut the message into this many parts and pipeline them.")
    ] = 1,
    shares: Annotated[
        str, typer.Option(metavar="SHARES", help="equal, bandwidth, or weights such as 4,4,1,1.")
    ] = "equal",
    order: Annotated[
        OrderChoice, typer.Option(help="Rings follow the cluster, or rank numbers.")
    ] = OrderChoice.CLUSTER,
    inside: Annotated[str, typer.Option(metavar="NAME", help="Hierarchical: the algorithm inside groups.")] = "gdraa",
    between: Annotated[
        str, typer.Option(metavar="NAME", help="Hierarchical: the algorithm between groups.")
    ] = "halving_doubling",
    root: Annotated[int, typer.Option(metavar="RANK", help="Broadcast: the rank that has the data.")] = 0,
    servers: Annotated[
        int, typer.Option(metavar="N", help="Sharded parameter server: how many ranks serve; 0 means a quarter.")
    ] = 0,
    sync: Annotated[str, typer.Option(metavar="TIME", help="Cost of one synchronisation, e.g. 5us.")] = "0us",
    add_rate: Annotated[
        str, typer.Option(metavar="RATE", help="Rate at which a rank can add, e.g. 10GB.")
    ] = "unlimited",
    in_flight: Annotated[int, typer.Option(metavar="N", help="Reads that a rank keeps in flight.")] = 8,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Finish a transfer when this fraction of its bytes is left: faster, with about that relative error.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of ECMP's hashes and of random placement.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace here (one algorithm).")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a PNG or SVG of ranks and links (one algorithm).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object; for several algorithms a list.")] = False,
) -> None:
    """Simulate a collective on a network: what each algorithm takes, and which link limits it.

    Example: mimatrix simulate --cluster leaf_spine:4x8 --bytes 64MiB
    """
    with progress("loading"):
        from mimatrix.cluster import Fabric, load_cluster
        from mimatrix.collectives import FitOptions
        from mimatrix.netsim import Costs

    names = _parse_algorithms(algorithm)
    _check_outputs(names, trace, picture)
    where: Placement | None = placement.value if placement else None
    options = FitOptions(
        ranks, where, _parse_shares(shares), segments, order.value, inside, between, root, servers, seed
    )
    costs = Costs(parse_seconds(sync), float("inf") if add_rate == "unlimited" else parse_rate(add_rate), in_flight)
    runs = _Runs(
        Fabric(load_cluster(cluster)), _parse_collective(collective), parse_bytes(size), options, costs, tolerance
    )
    runs.run(names, skip=algorithm == "all")
    if trace:
        from mimatrix.netsim.trace import chrome_trace

        write_json(chrome_trace(runs.timeline), trace)
    if picture:
        from mimatrix.netsim.drawing import draw_timeline

        save_picture(draw_timeline(runs.timeline, runs.reports[0].algorithm), picture)
    if as_json:
        for name, why in runs.left_out.items():
            typer.echo(f"left out: {name}: {why}", err=True)
        print_json([asdict(each) for each in runs.reports] if len(names) > 1 else asdict(runs.reports[0]))
    else:
        _print_reports(runs)


class _Runs:
    """The replays of one command: same cluster, same message, one algorithm after the other."""

    def __init__(
        self,
        fabric: "Fabric",
        collective: "Collective",
        message_bytes: int,
        wishes: "FitOptions",
        costs: "Costs",
        tolerance: float,
    ) -> None:
        self.fabric, self.collective, self.bytes = fabric, collective, message_bytes
        self.wishes, self.costs, self.tolerance = wishes, costs, tolerance
        self.reports: list[SimulationReport] = []
        self.left_out: dict[str, str] = {}
        self.timeline: Timeline

    def run(self, names: Sequence[str], *, skip: bool) -> None:
        """Replay each; with `skip`, those that cannot run here are left out with their reason."""
        from mimatrix.netsim import simulate as simulate_one

        for name in names:
            try:
                with progress(f"{name} on {self.fabric.cluster.name}", self._hint()) as show:
                    report, self.timeline = simulate_one(
                        name,
                        self.fabric,
                        self.collective,
                        self.bytes,
                        self.wishes,
                        self.costs,
                        tolerance=self.tolerance,
                        watch=show,
                    )
                self.reports.append(report)
            except UnsuitedError as error:
                if not skip:
                    raise
                self.left_out[name] = str(error)
        if not self.reports:
            raise UserError(next(iter(self.left_out.values())))

    def _hint(self) -> str:
        return "" if self.tolerance else " (--tolerance 0.01 is faster)"


def algorithms(
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of ranks that the costs are given for.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the algorithms: what each can do, requires and costs (all-reduce)."""
    from mimatrix.collectives import CATALOG

    if ranks < 2:
        raise UserError(f"a collective needs two ranks or more, got {ranks}; use for example --ranks 8")
    with progress("building what has no closed form"):
        rows = [_catalog_row(entry, ranks) for entry in CATALOG.values()]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _print_catalog(rows, ranks)


@dataclass(frozen=True, slots=True)
class _CatalogRow:
    """One algorithm and what its all-reduce costs."""

    algorithm: str
    collectives: tuple[str, ...]
    options: tuple[str, ...]
    requires: str
    ranks: int
    rounds: int
    busiest_rank_sends: float
    """Messages, all rounds together; in trees at the most."""
    roundings: int


def _catalog_row(entry: "Algorithm", ranks: int) -> _CatalogRow:
    """Return the costs by the catalog's closed forms, or from the schedule itself if there are none."""
    from mimatrix.collectives import AlgorithmRequest, Collective, build

    if entry.rounds and entry.sends and entry.roundings:
        costs = entry.rounds(ranks), float(entry.sends(ranks)), entry.roundings(ranks)
    else:
        schedule = build(entry.name, AlgorithmRequest(Collective.ALL_REDUCE, ranks))
        costs = len(schedule.rounds), float(schedule.sent().max()), schedule.roundings()
    kinds = tuple(each.value for each in entry.collectives)
    return _CatalogRow(entry.name, kinds, entry.options, entry.requires, ranks, *costs)


def _parse_algorithms(text: str) -> list[str]:
    from mimatrix.collectives import CATALOG, find

    names = list(CATALOG) if text == "all" else text.split(",")
    return [find(name).name for name in names]


def _check_outputs(names: Sequence[str], trace: Path | None, picture: Path | None) -> None:
    if trace:
        check_file(trace, (".json",))
    if picture:
        check_file(picture, (".png", ".svg", ".pdf"))
    if (trace or picture) and len(names) > 1:
        raise UserError("a trace or a picture shows one algorithm; name it, for example --algorithm gdraa")


def _parse_collective(text: str) -> "Collective":
    from mimatrix.collectives import Collective

    known = [each.value for each in Collective]
    if text not in known:
        raise UserError(f'unknown collective "{text}"{nearest(text, known)}')
    return Collective(text)


def _parse_shares(text: str) -> "Shares | Literal['equal', 'bandwidth']":
    from mimatrix.collectives import Shares

    if text == "equal":
        return "equal"
    if text == "bandwidth":
        return "bandwidth"
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f'invalid shares "{text}"; use equal, bandwidth, or weights such as 4,4,1,1') from None
    return Shares.of(weights)


def _print_reports(runs: _Runs) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    reports = sorted(runs.reports, key=lambda each: each.seconds)
    title = f"{runs.collective.value} of {format_bytes(runs.bytes)} over {reports[0].ranks} ranks of "
    table = Table(title=title + runs.fabric.cluster.name, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("algorithm", no_wrap=True)
    for heading in ("time", "/bound", "rounds", "flows"):
        table.add_column(heading, justify="right")
    table.add_column("busiest link", overflow="fold")
    table.add_column("used", justify="right")
    for report in reports:
        table.add_row(
            report.algorithm,
            format_seconds(report.seconds),
            f"{report.seconds / report.lower_bound_seconds:.2f}",
            str(report.rounds),
            str(report.max_link_flows),
            report.bottleneck,
            f"{report.bottleneck_use:.0%}",
        )
    console = plain_console()
    console.print(table)
    console.print("/bound: against what no algorithm can beat; flows: most on one link in a round", style="dim")
    if len(reports) == 1:
        console.print(f"- {format_rate(runs.bytes / reports[0].seconds)} of message (algorithm bandwidth)")
        console.print(f"- {reports[0].blame}")
        for reason in reports[0].reasons:
            console.print(f"- {reason}")
    for name, why in runs.left_out.items():
        console.print(f"left out: {name}: {why}", style="dim")


def _print_catalog(rows: list[_CatalogRow], ranks: int) -> None:
    from rich.table import Table

    table = Table(title=f"all-reduce among {ranks} ranks", title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    for heading in ("rounds", "sends", "roundings"):
        table.add_column(heading, justify="right")
    table.add_column("requires")
    for row in rows:
        sends = f"{row.busiest_rank_sends:.2f}"
        table.add_row(row.algorithm, str(row.rounds), sends, str(row.roundings), row.requires)
    console = plain_console()
    console.print(table)
    console.print("sends: messages of the busiest rank; roundings: how often an element is rounded", style="dim")
