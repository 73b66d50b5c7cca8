"""Both tutorials' loops on Gloo with 2 ranks, and on both backends with 4: `tutorials.py FOLDER`."""

import sys
from functools import partial
from pathlib import Path

import ddp
import fsdp2
import torch._dynamo  # noqa: F401 (DDP would import it in every rank, which takes long)
from forks import forked, require


def main(folder: Path) -> None:
    for ranks, backend in ((2, "gloo"), (4, "gloo"), (4, "mimatrix")):
        for tutorial in (ddp, fsdp2):
            place = folder / f"{tutorial.__name__}-{backend}-{ranks}"
            place.mkdir()

            main = partial(tutorial.main, backend, place / "found.pt")
            require(forked(ranks, lambda _, main=main: main()))  # type: ignore[misc]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
