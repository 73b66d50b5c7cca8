"""Export plain weights from a checkpoint: `python -m mimatrix.engine.checkpoint.export CHECKPOINT FILE`.

The last line on standard output is one JSON object: what was written, or `error` with a sentence.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mimatrix.core.errors import MiMatrixError, UserError, WorldError
from mimatrix.engine.checkpoint import storage as disk
from mimatrix.engine.checkpoint.json_codec import dtype_of
from mimatrix.engine.checkpoint.state import Metadata


def newest(folder: Path) -> tuple[Path, Metadata]:
    """The checkpoint at a path, or the newest good one in that folder."""
    alone = disk.is_checkpoint(folder)
    reasons = []
    for path in [folder] if alone else disk.checkpoints_in(folder):
        try:
            facts = disk.read_facts(path)
            disk.verify(path, facts)
        except WorldError as error:
            reasons.append(f"{path.name}: {error}")
            continue
        for reason in reasons:
            sys.stderr.write(f"mimatrix: skipped {reason}\n")
        return path, facts
    if reasons:
        raise UserError(f"no checkpoint in {folder} can be read: {reasons[0]}; give another")
    raise UserError(f"there is no checkpoint in {folder}; give a folder that run.save has written")


def weights(path: Path, facts: Metadata) -> dict[str, torch.Tensor]:
    """Parameters and buffers in their shapes, under all their names: tied ones are copies."""
    found = {name: _empty(entry) for name, entry in (facts["parameters"] | facts["buffers"]).items()}
    parts = {
        f"model.{name}": disk.TensorSlice(tensor.view(-1), 0, tensor.numel())
        for name, tensor in found.items()
        if tensor.numel()
    }
    disk.TensorReader(path).read(parts)
    copies = {other: found[name].clone() for name, entry in facts["parameters"].items() for other in entry["names"][1:]}
    return found | copies


def export(folder: Path, file: Path) -> dict[str, Any]:
    """Write the weights of a checkpoint into a safetensors file; what there is in it."""
    from safetensors.torch import save_file

    path, facts = newest(folder)
    found = weights(path, facts)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(found, unfinished, metadata={"format": "pt", "step": str(facts["step"])})
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    tied = [entry["names"] for entry in facts["parameters"].values() if len(entry["names"]) > 1]
    return {
        "file": str(file),
        "checkpoint": str(path),
        "step": facts["step"],
        "tensors": len(found),
        "bytes": file.stat().st_size,
        "tied": tied,
    }


def _empty(entry: Metadata) -> torch.Tensor:
    return torch.empty(entry["shape"], dtype=dtype_of(entry["dtype"]))


def main() -> None:
    """One export, told to whoever started this."""
    folder, file = map(Path, sys.argv[1:3])
    try:
        said = export(folder, file)
    except UserError as error:
        said = {"error": str(error), "code": 2}
    except (MiMatrixError, OSError) as error:
        said = {"error": str(error), "code": 1}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
