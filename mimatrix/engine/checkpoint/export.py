"""Export plain weights from a checkpoint: `python -m mimatrix.engine.checkpoint.export CHECKPOINT FILE`.

The last line on standard output is one JSON object: what was written, or `error` with a sentence.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from mimatrix.core.errors import MiMatrixError, UserError, WorldError
from mimatrix.core.files import replace_atomic
from mimatrix.core.logs import configure_logging
from mimatrix.engine.checkpoint import storage
from mimatrix.engine.checkpoint.json_codec import parse_dtype
from mimatrix.engine.checkpoint.state import Metadata
from mimatrix.engine.checkpoint.tensor_files import TensorReader, TensorSlice

logger = logging.getLogger(__name__)


def find_newest(folder: Path) -> tuple[Path, Metadata]:
    """Return the checkpoint at a path, or the newest intact one in that folder."""
    reasons = []
    for path in [folder] if storage.is_checkpoint(folder) else storage.list_checkpoints(folder):
        try:
            metadata = storage.read_metadata(path)
            storage.verify(path, metadata)
        except WorldError as error:
            reasons.append(f"{path.name}: {error}")
            continue
        for reason in reasons:
            logger.warning(f"skipped {reason}")
        return path, metadata
    if reasons:
        raise UserError(f"no checkpoint in {folder} can be read: {reasons[0]}; give another")
    raise UserError(f"there is no checkpoint in {folder}; give a folder that run.save has written")


def read_weights(path: Path, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Read parameters and buffers in their shapes, under all their names: tied ones are copies."""
    weights = {name: _empty_tensor(entry) for name, entry in (metadata["parameters"] | metadata["buffers"]).items()}
    parts = {
        f"model.{name}": TensorSlice(tensor.view(-1), 0, tensor.numel())
        for name, tensor in weights.items()
        if tensor.numel()
    }
    TensorReader(path, metadata).read(parts)
    tied = {
        other: weights[name].clone() for name, entry in metadata["parameters"].items() for other in entry["names"][1:]
    }
    return weights | tied


def export(folder: Path, file: Path) -> dict[str, Any]:
    """Write the weights of a checkpoint to a safetensors file, and return what is in it."""
    from safetensors.torch import save_file

    path, metadata = find_newest(folder)
    weights = read_weights(path, metadata)
    header = {"format": "pt", "step": str(metadata["step"])}
    replace_atomic(file, lambda partial: save_file(weights, partial, metadata=header))
    tied = [entry["names"] for entry in metadata["parameters"].values() if len(entry["names"]) > 1]
    return {
        "file": str(file),
        "checkpoint": str(path),
        "step": metadata["step"],
        "tensors": len(weights),
        "bytes": file.stat().st_size,
        "tied": tied,
    }


def _empty_tensor(entry: Metadata) -> torch.Tensor:
    return torch.empty(entry["shape"], dtype=parse_dtype(entry["dtype"]))


def main() -> None:
    """Export once, and print the result as JSON."""
    configure_logging()
    folder, file = map(Path, sys.argv[1:3])
    try:
        result = export(folder, file)
    except UserError as error:
        result = {"error": str(error), "code": 2}
    except (MiMatrixError, OSError) as error:
        result = {"error": str(error), "code": 1}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
