"""The command as people and machines use it: real processes, real output, one sentence for bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def mimatrix(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    plain = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mimatrix.cli.main", *words]
    return subprocess.run(command, cwd=cwd, env=plain, capture_output=True, text=True, timeout=100)


def refused(*words: str) -> str:
    """Return the one sentence that bad input ends with."""
    done = mimatrix(*words)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("mimatrix: ")
    return lines[0]


def test_simulate_prints_the_promised_fields() -> None:
    done = mimatrix("simulate", "--cluster", "bigraph:4x4", "--algorithm", "hdrm", "--bytes", "64MiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["algorithm"] == "hdrm"
    assert found["ranks"] == 32
    assert found["bytes"] == 64 << 20
    assert found["rounds"] == 10
    assert found["max_link_flows"] == 1
    assert "->" in found["bottleneck"]
    assert found["lower_bound_seconds"] <= found["seconds"] <= 1.01 * found["lower_bound_seconds"]


def test_simulate_all_leaves_out_what_does_not_fit_and_says_why() -> None:
    found = json.loads(mimatrix("simulate", "--cluster", "star:6", "--json").stdout)
    assert {each["algorithm"] for each in found} >= {"gdraa", "ring", "halving_doubling", "double_tree"}
    assert "hdrm" not in {each["algorithm"] for each in found}
    assert "left out: hdrm: hdrm needs a BiGraph" in mimatrix("simulate", "--cluster", "star:6").stdout


def test_placements_differ(tmp_path: Path) -> None:
    asked = ("simulate", "--cluster", "bigraph:4x4", "--algorithm", "hdrm", "--json")
    flows = {
        placement: json.loads(mimatrix(*asked, "--placement", placement).stdout)["max_link_flows"]
        for placement in ("hdrm", "random", "given")
    }
    assert flows["hdrm"] == 1
    assert flows["random"] > 1
    assert flows["given"] > 1


def test_simulate_writes_trace_and_picture(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    words = ("--algorithm", "gdraa", "--segments", "4", "--shares", "bandwidth")
    done = mimatrix(
        "simulate", "--cluster", "examples/lab.toml", *words, "--trace", str(trace), "--picture", str(picture)
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(trace.read_text())["traceEvents"]) > 20
    assert picture.read_text().startswith("<?xml")
    assert "the slowest NIC owns" in done.stdout.replace("\n", " ")


def test_topology_prints_draws_and_writes_a_file_that_can_be_read(tmp_path: Path) -> None:
    picture, again = tmp_path / "net.png", tmp_path / "again.toml"
    done = mimatrix("topology", "leaf_spine:2x4,oversubscription=2", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.stat().st_size > 5_000
    assert "oversubscribed: leaf0" in done.stdout
    again.write_text(mimatrix("topology", "leaf_spine:2x4,oversubscription=2", "--toml").stdout)
    family, file = (
        json.loads(mimatrix("topology", word, "--json").stdout)
        for word in ("leaf_spine:2x4,oversubscription=2", str(again))
    )
    assert family == file
    assert family["most_hops"] == 3


def test_algorithms_lists_the_catalog() -> None:
    rows = {row["algorithm"]: row for row in json.loads(mimatrix("algorithms", "--ranks", "16", "--json").stdout)}
    assert rows["gdraa"]["rounds"] == 2
    assert rows["ring"]["roundings"] == 15
    assert "ring" in mimatrix("algorithms").stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["simulate", "--cluster", "stars:8"], 'did you mean "star"?'),
        (["simulate", "--cluster", "star:1"], "1 ranks do not fit star:1"),
        (["simulate", "--cluster", "star:4", "--ranks", "9"], "use 2 to 4 ranks"),
        (["simulate", "--cluster", "star:4", "--algorithm", "rings"], 'did you mean "ring"?'),
        (["simulate", "--cluster", "star:4", "--algorithm", "hdrm"], "use halving_doubling"),
        (["simulate", "--cluster", "star:4", "--bytes", "many"], "write for example 64MiB"),
        (["simulate", "--cluster", "star:4", "--bytes", "0"], "use 1 byte or more"),
        (["simulate", "--cluster", "star:4", "--collective", "allreduce"], 'did you mean "all_reduce"?'),
        (["simulate", "--cluster", "star:4", "--shares", "1,2"], "give one for each rank"),
        (["simulate", "--cluster", "star:4", "--shares", "-1,2,3,4"], "not negative"),
        (["simulate", "--cluster", "star:4", "--segments", "0"], "use 1 or more"),
        (["simulate", "--cluster", "star:4,rate=-1Gbit"], "must be above zero"),
        (["simulate", "--cluster", "star:4", "--sync", "-1us"], "must not be negative"),
        (["simulate", "--cluster", "star:4", "--in-flight", "0"], "use 1 or more"),
        (["simulate", "--cluster", "star:4", "--picture", "x.png"], "shows one algorithm"),
        (["simulate", "--cluster", "star:4", "--algorithm", "ring", "--picture", "x.gif"], "use .png or .svg"),
        (["simulate", "--cluster", "star:4", "--algorithm", "ring", "--trace", "/nowhere/x.json"], "does not exist"),
        (["simulate", "--cluster", "nowhere.toml"], 'there is no cluster file "nowhere.toml"'),
        (["simulate", "--cluster", "star:90000", "--algorithm", "ring"], "use fewer ranks"),
        (["simulate", "--cluster", "star:4", "--placement", "random", "--algorithm", "ring", "--picture", "."], "."),
        (["topology", "bigraph:4"], "bigraph:4x4"),
        (["topology", "star:4", "--toml", "--json"], "--toml"),
        (["topology", "star:4", "--picture", "tests.png/x.png"], "does not exist"),
        (["topology", "star:4", "--picture", "README.md/x.png"], "is a file; make it first, or choose another"),
        (["topology", "star:4", "--picture", f"{'x' * 300}.png"], "cannot be written (File name too long); choose"),
        (["algorithms", "--ranks", "1"], "two ranks or more"),
    ],
)
def test_bad_input_gets_one_sentence(words: list[str], sentence: str) -> None:
    assert sentence in refused(*words)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files")
@pytest.mark.parametrize(
    "words",
    [
        ("topology", "star:4", "--picture", "/proc/x.png"),
        ("simulate", "--cluster", "star:4", "--algorithm", "ring", "--trace", "/proc/x.json"),
        ("plan", "--profiles", "examples/lab_profiles.json", "--global-batch", "8", "-o", "/proc/x.json"),
        ("demo", "--picture", "/proc/x.png"),
    ],
)
def test_a_folder_that_takes_no_files_gets_one_sentence(words: tuple[str, ...]) -> None:
    assert re.search(r'"/proc/x\.\w+" cannot be written.*; choose another file', refused(*words))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "plan.json").symlink_to("/dev/full")
    words = ("plan", "--profiles", "examples/lab_profiles.json", "--global-batch", "8")
    assert "(No space left on device); choose another" in refused(*words, "-o", str(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[[node]]\nname = "a"\ndevices = [{kind = "x"}]\n\n[[lnk]]\n',
            'line 5, key "lnk": unknown key; did you mean "link"?',
        ),
        (
            '[[node]]\nname = "a"\ndevices = [{kind = "x"}]\nbuss = 1\n',
            'line 4, key "buss" in [[node]] number 1: unknown key',
        ),
        ("[[node]\n", "is not TOML"),
        (
            '[[node]]\nname = "a"\ndevices = [{}]\ncount = 2\n[[switch]]\nname = "s"\n'
            '[[link]]\nbetween = ["a0", "s"]\nrate = "-1Gbit"\n',
            "line 9",
        ),
        ('[[node]]\nname = "a"\ndevices = [{}]\ncount = 2\n', "a0/0 cannot reach a1/0"),
    ],
)
def test_bad_cluster_files_get_the_line(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert sentence in refused("simulate", "--cluster", str(path), "--algorithm", "gdraa")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    script = f"{sys.executable} -m mimatrix.cli.main topology star:600 --toml | head -n 1"
    done = subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("name")


def test_seeds_and_weights_may_be_extreme() -> None:
    asked = ("simulate", "--cluster", "star:4", "--algorithm", "gdraa", "--json")
    for words in (("--seed", "-1", "--placement", "random"), ("--shares", "1e308,1e308,1,1")):
        assert json.loads(mimatrix(*asked, *words).stdout)["seconds"] > 0


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(mimatrix("topology", "star:4", "--toml").stdout.replace("star:4", "[/dim] x", 1))
    for words in (("topology", str(path)), ("simulate", "--cluster", str(path), "--algorithm", "ring")):
        done = mimatrix(*words)
        assert done.returncode == 0, done.stderr
        assert "[/dim] x" in done.stdout


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ('[[node]]\nname = "lonely"\ndevices = [{kind = "x"}]\n', "cannot reach"),
        ('[[node]]\nname = "n"\ndevices = [{kind = "x"}]\nforwards = true\n', "cannot reach"),
    ],
)
def test_devices_that_no_link_reaches_are_named(change: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(mimatrix("topology", "bigraph:2x2", "--toml").stdout + change)
    assert sentence in refused("simulate", "--cluster", str(path), "--algorithm", "gdraa")


def test_waiting_times_have_the_names_and_units_that_people_use() -> None:
    rows = json.loads(mimatrix("simulate-queue", "examples/queue.json", "--json").stdout)
    assert all({"p50_waited_s", "p95_waited_s", "max_waited_s"} <= set(row) for row in rows)
    table = mimatrix("simulate-queue", "examples/queue.json", "--jobs").stdout
    assert "p95" in table
    assert "submitted" in table
    # No one reads 38915s: beyond two minutes times are in minutes, hours or days.
    assert not re.search(r"\b\d{4,}s\b", table)
