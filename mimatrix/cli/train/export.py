"""`mimatrix export`: plain weights out of a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mimatrix.cli.output import check_file, print_json, progress
from mimatrix.core.errors import UserError, WorldError
from mimatrix.core.units import format_bytes


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them: its newest good one.")],
    file: Annotated[Path, typer.Argument(help="What to write, as in model.safetensors.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the weights of a checkpoint into one safetensors file, whatever ranks and stage it was saved with.

    Parameters and buffers have the model's own names and shapes; tied ones are there under each of their names, so that
    model.load_state_dict(safetensors.torch.load_file("model.safetensors")) takes them.

    Example: mimatrix export checkpoints model.safetensors
    """
    check_file(file, (".safetensors",))
    if not checkpoint.is_dir():
        raise UserError(f'there is no folder "{checkpoint}"; give a checkpoint that run.save has written')
    with progress("reading the checkpoint"):
        found = _exported(checkpoint, file)
    if as_json:
        print_json(found)
        return
    typer.echo(f"{found['file']}: {found['tensors']} tensors, {format_bytes(found['bytes'])}, of {found['checkpoint']}")
    for names in found["tied"]:
        typer.echo(f"tied weights, written for each name: {', '.join(names)}")


def _exported(checkpoint: Path, file: Path) -> dict[str, Any]:
    """By a process of its own: the command itself knows nothing of torch."""
    command = [sys.executable, "-m", "mimatrix.engine.checkpoint.export", str(checkpoint), str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 (our own)
    if done.returncode:
        raise WorldError(f"the export failed (exit code {done.returncode}); its own words are above")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in said:
        raise (UserError if said["code"] == 2 else WorldError)(said["error"])
    return said
