"""Record the losses of small training runs bit for bit, and compare: `python -m bench.recorded_losses record|compare FILE`.

`record FILE` trains every configuration (`configurations.py`) and writes the loss of every step as a hex float, with a SHA-256 of the
final parameters. `compare FILE` records again and reports every difference; `compare FILE OTHER` compares two files. `--tree PATH`
records another checkout of the repository. `--only TEXT` takes configurations with TEXT in their name.

Every run passes `plan=None`, explicit batches and a seed. Collectives are pinned to one transport and algorithm, because the tuner
otherwise takes the fastest, and another algorithm sums in another order. What remains are the CPU and the build of torch: a record holds on
machines that have the same ones, and the file names them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.markdown import ROOT
from bench.recorded_losses.configurations import Configuration, configurations

VERSION = 1
RANKS = Path(__file__).with_name("ranks.py")
PINNED = "windows gdraa"
"""What carries all-reduces; other collectives take the windows, too."""


def main() -> None:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m bench.recorded_losses", description=__doc__)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path, help="the record to write, or to compare with")
    parser.add_argument("other", type=Path, nargs="?", help="compare with this record instead of a new one")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to record (default: this one)")
    parser.add_argument("--only", default="", help="take only configurations with this text in their name")
    options = parser.parse_args()
    if options.command == "record":
        options.file.write_text(dump(record(options.tree, options.only)))
        return
    expected = json.loads(options.file.read_text())
    actual = json.loads(options.other.read_text()) if options.other else record(options.tree, options.only)
    report, is_same = compare(expected, actual, options.only)
    print(report)
    sys.exit(0 if is_same else 1)


def record(tree: Path, only: str = "") -> dict[str, Any]:
    """Train every configuration with the code of a checkout, and return the record."""
    tree = tree.resolve()
    chosen = [config for config in configurations() if only in config.name]
    began, commit = time.monotonic(), _commit(tree)
    with tempfile.TemporaryDirectory() as folder:
        config_path, result_path = Path(folder) / "configurations.json", Path(folder) / "results.json"
        config_path.write_text(json.dumps([_to_json(config, tree) for config in chosen]))
        command = [sys.executable, str(RANKS), str(config_path), str(result_path)]
        done = subprocess.run(command, cwd=tree, env=_environment(tree, folder), stdout=sys.stderr)
        if done.returncode:
            raise SystemExit(f"recording failed with exit code {done.returncode}; see the error above")
        results = json.loads(result_path.read_text())
    print(f"{len(chosen)} configurations in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return {"version": VERSION, "commit": commit, **results}


def compare(expected: dict[str, Any], actual: dict[str, Any], only: str = "") -> tuple[str, bool]:
    """Return a report of all differences, and whether there are none."""
    if expected["version"] != actual["version"]:
        return f"the records have versions {expected['version']} and {actual['version']}; record both again", False
    wanted = {name: run for name, run in expected["runs"].items() if only in name}
    runs = {name: run for name, run in actual["runs"].items() if only in name}
    lines = [f"{name}: only in one of the records" for name in sorted(wanted.keys() ^ runs.keys())]
    for name in wanted.keys() & runs.keys():
        lines += [f"{name}: {text}" for text in _differences(wanted[name], runs[name])]
    machines = [
        f"{key}: {was} and {actual['machine'][key]}"
        for key, was in expected["machine"].items()
        if was != actual["machine"][key]
    ]
    if not lines and wanted:
        return f"identical: {len(wanted)} configurations, {_short(expected)} and {_short(actual)}", True
    if machines:
        lines.append(f"recorded on different machines ({'; '.join(machines)}): differences may come from there")
    return "\n".join([*sorted(lines), f"DIFFERENT: {_short(expected)} and {_short(actual)}"]), False


def dump(recorded: dict[str, Any]) -> str:
    """Return a record as JSON with one line per run, so that a diff names the runs that changed."""
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in recorded["runs"].items())
    head = {name: value for name, value in recorded.items() if name != "runs"}
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "runs": {{\n{runs}\n }}\n}}\n'


def _differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    lines = []
    for group, (wanted, losses) in enumerate(zip(expected["losses"], actual["losses"], strict=True)):
        if len(wanted) != len(losses):
            lines.append(f"group {group} has {len(wanted)} and {len(losses)} steps")
        steps = [step for step, (one, other) in enumerate(zip(wanted, losses, strict=False)) if one != other]
        if steps:
            step = steps[0]
            apart = abs(float.fromhex(wanted[step]) - float.fromhex(losses[step]))
            lines.append(
                f"losses of group {group} differ from step {step} on: {wanted[step]} and {losses[step]} ({apart:.1e} apart)"
            )
    if not lines and expected["parameters"] != actual["parameters"]:
        lines.append("the same losses, but other parameters at the end")
    return lines


def _to_json(config: Configuration, tree: Path) -> dict[str, Any]:
    return {**asdict(config), "name": config.name, "script": str(tree / "examples" / "train.py")}


def _environment(tree: Path, folder: str) -> dict[str, str]:
    """Return the environment of the ranks: one thread, pinned collectives, an empty cache, nothing of a launcher."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MIMATRIX_")}
    return inherited | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MIMATRIX_CACHE": folder,
        "MIMATRIX_TRANSPORT": PINNED,
        "MIMATRIX_PATH": PINNED,  # its name before it was renamed
    }


def _short(recorded: dict[str, Any]) -> str:
    commit, *changes = recorded["commit"].split(" ", 1)
    return " ".join([commit[:7], *changes])


def _commit(tree: Path) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "--no-optional-locks", "status", "--porcelain", "mimatrix", "examples"],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    return f"{commit} with changes" if changed.stdout else commit


if __name__ == "__main__":
    main()
