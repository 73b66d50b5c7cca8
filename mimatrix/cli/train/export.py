"""`mimatrix export`: write the weights of a checkpoint as a safetensors file."""

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
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a directory of them, of which the newest valid one is taken."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, e.g. model.safetensors.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write the weights of a checkpoint into one safetensors file, for any number of ranks and any stage.

    Parameters and buffers have the model's own names and shapes; tied ones appear under each of their names, so that
    model.load_state_dict(safetensors.torch.load_file("model.safetensors")) takes them.

    Example: mimatrix export checkpoints model.safetensors
    """
    check_file(file, (".safetensors",))
    if not checkpoint.is_dir():
        raise UserError(f'there is no folder "{checkpoint}"; give a checkpoint that run.save has written')
    with progress("reading the checkpoint"):
        exported = _export(checkpoint, file)
    if as_json:
        print_json(exported)
        return
    typer.echo(
        f"{exported['file']}: {exported['tensors']} tensors, {format_bytes(exported['bytes'])}, "
        f"of {exported['checkpoint']}"
    )
    for names in exported["tied"]:
        typer.echo(f"tied weights, written for each name: {', '.join(names)}")


def _export(checkpoint: Path, file: Path) -> dict[str, Any]:
    """Export in a process of its own: the command itself does not import torch."""
    command = [sys.executable, "-m", "mimatrix.engine.checkpoint.export", str(checkpoint), str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 (our own)
    if done.returncode:
        raise WorldError(f"the export failed (exit code {done.returncode}); see its output above")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in said:
        raise (UserError if said["code"] == 2 else WorldError)(said["error"])
    return said
