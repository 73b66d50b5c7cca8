"""Make docs/measurements/engine.md: `python -m bench.engine [speed] [memory] [losses]`, all of them without a word.

Figures are stored next to the page, so that one part can be measured again alone. The part with the GPU is measured on another
machine by `python -m bench.engine.gpu docs/measurements/engine/gpu.json`, and exactness there by tests/engine/test_engine_gpu.py.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.markdown import MEASUREMENTS, ROOT, machine, table, write_page

FOLDER = MEASUREMENTS / "engine"
RUN = [sys.executable, "-m", "mimatrix.cli.main", "run"]
SHARES = (0.7, 0.2, 0.1)
CHECKPOINTS = """## 6. Checkpoints

`tests/engine/checkpoint/test_manager.py`: saved in stage 3 on 4 uneven ranks (one without data, one without a shard), loaded in stage 0 on 1, stage 1
on 2 and stage 2 on 3 ranks: all tensors the same to the last bit, the next 10 losses those of the uninterrupted run within 1e-10
(float64). `make soak` kills processes while they save, 20 times: [soak.md](soak.md).
"""
PEERS = {"stage 0": "DDP, Gloo", "stage 3": "FSDP2, Gloo"}


def main() -> None:
    """Measure the given parts, then write the page from all stored figures."""
    parts = {"speed": speed, "memory": memory, "losses": losses}
    for name in sys.argv[1:] or parts:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(parts[name](), indent=1) + "\n")
    sections = [
        _losses(_load("losses")),
        _memory(_load("memory")),
        _speed(_load("speed")),
        _gpu(_load("gpu")),
        CHECKPOINTS,
    ]
    write_page(
        "engine.md",
        f"""# The engine

CPU figures: {machine()}, one thread for each rank. Made by `make engine`; the GPU part by `python -m bench.engine.gpu`.

## 1. Exactness

`pytest tests/engine/test_exact.py`: parameters after 5 steps against a plain loop in one process on the union batch, float64, within
1e-10, for stages 0 to 3, worlds 1 to 4, splits drawn by hypothesis (ranks without data, without a shard, any micro-steps), SGD with
momentum and AdamW with two param groups, an MLP with frozen and unused parameters, a small ResNet with synchronised batch norm, a
transformer with tied weights, padded tokens and clipping.

{"".join(sections)}""",
    )


def speed() -> Any:
    """Measure steps side by side."""
    done = _done([sys.executable, "-m", "bench.engine.speed"])
    return json.loads(done.splitlines()[-1])


def memory() -> Any:
    """Measure the memory of ranks, by stage."""
    script = str(ROOT / "tests" / "engine" / "scripts" / "memory.py")
    figures = {}
    for stage in range(4):
        words = [*RUN, "-n", str(len(SHARES)), script, str(stage), ",".join(map(str, SHARES)), "0"]
        said = _done(words, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
        ranks = [json.loads(line.partition("] ")[2]) for line in said.splitlines() if "{" in line]
        figures[str(stage)] = sorted(ranks, key=lambda each: int(each["rank"]))
    return figures


def losses() -> Any:
    """Train the same script in three ways, by stage: the largest difference between their losses."""
    script, torchrun = (
        str(ROOT / "examples" / "train.py"),
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    )
    ways = {
        "alone": [sys.executable, script],
        "mimatrix run -n 3 --speeds 1,0.5,0.25": [
            *RUN,
            "-n",
            "3",
            "--speeds",
            "1,0.5,0.25",
            script,
            "--batch",
            "32,20,12",
        ],
        "torchrun, 2 ranks": [sys.executable, *torchrun, script],
    }
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for stage in range(4):
            curves = {}
            for name, words in ways.items():
                file = Path(folder) / "losses.json"
                _done([*words, "--stage", str(stage), "--losses", str(file)])
                curves[name] = json.loads(file.read_text())
            alone = curves.pop("alone")
            figures[str(stage)] = {
                name: max(abs(one - other) for one, other in zip(alone, curve, strict=True))
                for name, curve in curves.items()
            }
    return figures


def _done(words: list[str], **variables: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, cwd=ROOT, env=os.environ | variables)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr[-3000:]}")
    return done.stdout


def _load(name: str) -> Any:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _losses(figures: Any) -> str:
    body = [[f"stage {stage}", *(f"{apart:.1e}" for apart in ways.values())] for stage, ways in figures.items()]
    headings = ["", *next(iter(figures.values()))]
    return f"""## 2. The same script, the same losses

`examples/train.py` (64 steps, AdamW, float64; batches 32, 20, 12 on the three ranks of unlike speed): the largest difference of a loss
from that of the script alone in one process.

{table(headings, body)}
"""


def _memory(figures: Any) -> str:
    body = []
    for stage, ranks in figures.items():
        for share, each in zip(SHARES, ranks, strict=True):
            kept = _expected_bytes(int(stage), share, each["model"])
            over = (each["peak"] - kept) / 1e6
            body.append(
                [f"stage {stage}, share {share}", f"{kept / 1e6:.0f}", f"{each['peak'] / 1e6:.0f}", f"{over:.0f}"]
            )
    unit = 4 * (1024 * 1024 + 1024) / 1e6
    return f"""## 3. Memory

32 linear layers of 1024 with Adam (134 MB of parameters, 537 MB with gradients and state), three ranks with shares 0.7, 0.2, 0.1, a unit
of {unit:.1f} MB for each layer. *Table*: parameters + gradients + optimizer state that the stage keeps. *Peak*: as the kernel counts it during the
backward pass (private pages and those of the rank's own arena, above what the process had before the model). *Over*: units in flight.
`tests/engine/test_memory.py` holds it within 5 % and 8 units, and trains in stage 3 a model whose state (537 MB) exceeds the 349 MB
that each rank may have (stage 0 fails there).

{table(["MB", "table", "peak", "over"], body)}
"""


def _expected_bytes(stage: int, share: float, model: int) -> float:
    """Return the expected bytes of parameters, gradients and Adam's two moments, each cut from its stage on."""
    return model * ((share if stage == 3 else 1) + (share if stage >= 2 else 1) + 2 * (share if stage >= 1 else 1))


def _speed(figures: Any) -> str:
    text = """## 4. Speed

Two equal ranks on two cores, a step of each in turns in the same processes, 100 steps; medians and quartiles in ms. *Communication*:
8 linear layers of 1024, batch 16, SGD. *Computing*: 5 convolutions of 32 channels on 32 x 32 pictures, batch 16, SGD. The engine's steps
include its loader, the others' do not. Three runs of the command gave stage 0 1.81, 1.71 and 1.86 times DDP's speed (the last one is shown).

"""
    for name, ways in figures.items():
        body = []
        for way, quarters in ways.items():
            peer = PEERS.get(way)
            ratio = f"**{ways[peer][1] / quarters[1]:.2f}x** {peer}" if peer else ""
            body.append([way, f"{1e3 * quarters[1]:.1f}", f"{1e3 * quarters[0]:.1f} to {1e3 * quarters[2]:.1f}", ratio])
        text += table([name, "median", "quartiles", ""], body) + "\n"
    return text


def _gpu(figures: Any) -> str:
    if not figures:
        return ""
    body = []
    for name in ("ResNet-50", "GPT, 124M"):
        plain, engine = figures[name]["plain"], figures[name]["engine"]
        spread = f"{1e3 * engine[0]:.2f} to {1e3 * engine[2]:.2f}"
        body.append([name, f"{1e3 * plain[1]:.2f}", f"{1e3 * engine[1]:.2f}", spread, f"{engine[1] / plain[1]:.4f}"])
    return f"""## 5. One GPU

{figures["gpu"]}, torch {figures["torch"]}, one process, bf16, fused AdamW, turns of ten steps; ms for each step. ResNet-50 with 128 pictures of
224 x 224, GPT-2's smallest size with 8 sequences of 1024 tokens.

{table(["", "plain loop", "engine", "quartiles", "ratio"], body)}
Three processes with 60, 25 and 10 % of the GPU under CUDA MPS (`tests/engine/test_engine_gpu.py`; batches 5, 2, 0, shares 0.6, 0.3, 0.1, float64,
5 steps) against a plain loop on the same GPU: MLP within 6e-17, transformer within 7e-15, ResNet with batch norm within 3e-16, in all four
stages.

"""


if __name__ == "__main__":
    main()
