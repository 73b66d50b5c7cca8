"""`mimatrix lab`: an emulated cluster on this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.output import plain_console, print_json, progress
from mimatrix.core.units import format_bytes, format_rate, parse_duration

if TYPE_CHECKING:
    from mimatrix.lab import Lab
    from mimatrix.processes.group_exit import GroupExit

lab = typer.Typer(
    help="Emulate a cluster on this machine (Linux, root): namespaces connected by links with given rates.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Name = Annotated[str, typer.Option("--name", metavar="NAME", help="The lab, if there are several.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Grace = Annotated[
    str, typer.Option(metavar="TIME", help="How long the other ranks may continue after one has failed.")
]
_Timeout = Annotated[
    str, typer.Option(metavar="TIME", help="Stop all ranks after this time, e.g. 5min; exit code 124.")
]


@lab.command()
def up(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A TOML file, or a topology such as star:4,rate=400Mbit.")
    ],
    name: _Name = "lab",
    cpus: Annotated[
        str, typer.Option(metavar="LIST", help="CPUs of each node, e.g. 1,1,0.5,0.25.", show_default="unlimited")
    ] = "",
    as_json: _Json = False,
) -> None:
    """Create the lab of a cluster. It stays until `mimatrix lab down`.

    Example: mimatrix lab up star:4,rate=2*400Mbit+2*100Mbit --cpus 1,1,0.5,0.25
    """
    with progress("making the lab") as show:
        from mimatrix import lab as labs
        from mimatrix.cluster import load_cluster
        from mimatrix.processes.cgroups import parse_cpus

        described = load_cluster(cluster)
        quotas = parse_cpus(cpus, len(described.nodes)) if cpus else ()
        made = labs.up(described, name, quotas, show)
    if as_json:
        print_json(_describe_lab(made))
        return
    layout = made.layout
    named = "" if name == "lab" else f" --name {name}"
    plain_console().print(
        f'lab "{name}" is up: {len(layout.seats)} ranks on {len(described.nodes)} nodes, '
        f"{len(described.switches)} switches, {len(layout.cables)} cables\n"
        f"next: mimatrix lab run{named} -- COMMAND; mimatrix lab status{named}; mimatrix lab down{named}"
    )


@lab.command()
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command of every rank, after --.")],
    name: _Name = "lab",
    grace: _Grace = "10s",
    timeout: _Timeout = "",
) -> None:
    """Run a command once for every rank, with torchrun's variables, and wait for all.

    Example: mimatrix lab run -- python train.py
    """
    from mimatrix import lab as labs

    grace_s, timeout_s = parse_duration(grace), parse_duration(timeout) if timeout else None
    _exit(labs.run(labs.recall(name), command, grace_s=grace_s, timeout_s=timeout_s))


@lab.command()
def gpu(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command of every rank, after --.")],
    parts: Annotated[
        str,
        typer.Option(
            metavar="PARTS", help="One part for each rank, e.g. 60:40GB,25,cpu: percent and memory, percent, or a CPU."
        ),
    ],
    hosts: Annotated[
        str, typer.Option(metavar="LIST", help="The host of each rank, e.g. a,a,b.", show_default="all on one")
    ] = "",
    gpus: Annotated[
        int, typer.Option(metavar="N", help="How many GPUs to share; ranks of a host take turns.", min=1)
    ] = 1,
    grace: _Grace = "10s",
    timeout: _Timeout = "",
) -> None:
    """Run a command on parts of a GPU that emulate different GPUs on several hosts (CUDA MPS).

    Example: mimatrix lab gpu --parts 60:40GB,25:20GB,10:10GB --hosts a,a,b -- python train.py
    """
    from mimatrix import lab as labs

    grace_s, timeout_s = parse_duration(grace), parse_duration(timeout) if timeout else None
    _exit(labs.run_gpu(labs.parse_parts(parts, hosts), command, gpus=gpus, grace_s=grace_s, timeout_s=timeout_s))


@lab.command()
def status(name: _Name = "lab", as_json: _Json = False) -> None:
    """Show the ranks with their addresses, and every link with its rate and the bytes that it has carried."""
    from mimatrix import lab as labs

    found = labs.recall(name)
    if as_json:
        print_json(_describe_lab(found))
    else:
        _print(found)


@lab.command()
def down(name: _Name = "lab", as_json: _Json = False) -> None:
    """Remove a lab, including what a crash has left."""
    with progress("removing the lab"):
        from dataclasses import asdict

        from mimatrix import lab as labs

        removed = labs.down(name)
    if as_json:
        print_json({"name": name} | asdict(removed))
    elif removed.nothing:
        typer.echo(f'no lab "{name}" is up; nothing was removed')
    else:
        ended = f", {removed.processes} processes ended" if removed.processes else ""
        typer.echo(f'lab "{name}" is removed: {removed.namespaces} namespaces{ended}')


def _exit(ending: "GroupExit") -> None:
    """Leave with the exit code of ranks that failed, and say why."""
    if ending.code:
        typer.echo(f"mimatrix: {ending.describe()}", err=True)
        raise typer.Exit(ending.code)


def _describe_lab(found: "Lab") -> dict[str, object]:
    from dataclasses import asdict

    from mimatrix import lab as labs

    channels = found.layout.fabric.channels
    ports = found.layout.ports
    return {
        "name": found.name,
        "cluster": found.cluster.name,
        "cluster_file": str(found.cluster_file),
        "cpus": list(found.cpus) or None,
        "ranks": [asdict(seat) | {"namespace": labs.namespace(found.name, seat.node)} for seat in found.layout.seats],
        "channels": [
            asdict(ports[number]) | {"name": channels[number].name, "bytes": count}
            for number, count in enumerate(labs.channel_bytes(found))
            if number in ports
        ],
    }


def _print(found: "Lab") -> None:
    from rich.table import Table

    from mimatrix import lab as labs

    ranks = Table("rank", "node", "address", "interface", "cpus", title=f'lab "{found.name}": {found.cluster.name}')
    for seat in found.layout.seats:
        cpus = f"{found.cpus[seat.node_index]:g}" if found.cpus else "-"
        ranks.add_row(str(seat.rank), seat.node, seat.address, seat.interface, cpus)
    counts = labs.channel_bytes(found)
    links = Table("link", "rate", "bytes there", "bytes back")
    for cable in found.layout.cables:
        there, back = cable.near.channel, cable.far.channel
        name = found.layout.fabric.channels[there].name.replace("->", " - ")
        rate = format_rate(cable.near.rate_bytes_per_s)
        links.add_row(name, rate, format_bytes(counts[there]), format_bytes(counts[back]))
    console = plain_console()
    console.print(ranks)
    console.print(links)
