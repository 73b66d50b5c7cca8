"""`mimatrix profile` as people use it: workers measure and end, the command stores, prints and draws."""

import json
from pathlib import Path

import pytest
from test_commands import ROOT, mimatrix

from mimatrix.cluster import load_cluster
from mimatrix.planner.model.profile import Measurements

# What the engine does in `run.prepare`, without torch: rank 0 stores, all end.
TELL = """
import os, sys
sys.path.insert(0, {root!r})
if os.environ["RANK"] == "0":
    from mimatrix.planner.model.curve import Curve
    from mimatrix.planner.model.profile import Measurements, ModelSize, Profile
    def profile(rate):
        sizes = (1, 2, 4, 8)
        seconds, memory = (Curve.of((size, size * each) for size in sizes) for each in (1 / rate, 1000))
        return Profile("cpu", "m", seconds, memory, 1 << 30, 0.002, noise=0.01, took_s=3.0, overflows=1)
    found = Measurements(ModelSize("m", "Little", 10, 40, 40, 80, 40), (profile(2000.0), profile(500.0)))
    open(os.environ["MIMATRIX_PROFILE"], "w").write(found.to_text())
print("told", sys.argv[1:], os.environ.get("MIMATRIX_MEMORY"))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tell.py"
    path.write_text(TELL.format(root=str(ROOT)))
    return path


def test_tables_files_and_pictures(script: Path) -> None:
    picture = script.with_name("curves.svg")
    words = ("-n", "2", "--memory", "1GB", "--sizes", "--picture", str(picture), str(script), "--lr", "1")
    done = mimatrix("profile", *words, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "[1] told ['--lr', '1'] 1000000000" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "cpu", "8", "2,000", "1.0%", "2ms", "1GiB", "3s", "1"] in rows
    assert ["1", "8", "16ms", "500", "8kB"] in rows
    assert "Little" in picture.read_text()
    found = Measurements.from_text((script.parent / "profile.json").read_text())
    assert [each.seconds.most for each in found.profiles] == [8, 8]


def test_json_is_all_of_standard_output(script: Path) -> None:
    stored = script.with_name("other.json")
    done = mimatrix("profile", "-n", "2", "--json", "-o", str(stored), str(script))
    assert json.loads(done.stdout) == json.loads(stored.read_text())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nope.py",), "there is no script"),
        (("-n", "2", "--speeds", "1", "tell.py"), "give one for each"),
        (("-n", "3", "--memory", "1GB,2GB", "tell.py"), "--memory has 2 sizes for 3 ranks; give one for each"),
        (("--memory", "much", "tell.py"), "is not a size; write"),
        (("-o", "profile.txt", "tell.py"), "use .json"),
        (("--picture", "x.gif", "tell.py"), "use .png or .svg"),
        (("plain.py",), "plain.py ended without having measured; call run.prepare"),
    ],
)
def test_bad_input_is_one_sentence(script: Path, words: tuple[str, ...], sentence: str) -> None:
    script.with_name("plain.py").write_text("")
    done = mimatrix("profile", *words, cwd=script.parent)
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("mimatrix: ")
    assert sentence in line
    assert not script.with_name("profile.json").exists()


def test_a_worker_that_fails_is_named_and_nothing_is_stored(script: Path) -> None:
    script.write_text("import sys; sys.exit(3)")
    done = mimatrix("profile", str(script), cwd=script.parent)
    assert (done.returncode, done.stdout) == (3, "")
    assert "mimatrix: rank 0 ended with exit code 3" in done.stderr
    assert not script.with_name("profile.json").exists()


def test_the_example_is_measured_and_not_trained(tmp_path: Path) -> None:
    stored, cluster = tmp_path / "profile.json", tmp_path / "cluster.toml"
    words = ("-n", "2", "-o", str(stored), "--cluster", str(cluster), "--timeout", "90s")
    done = mimatrix("profile", *words, "examples/train.py")
    assert done.returncode == 0, done.stderr
    assert "ranks, " not in done.stderr, "the script's last line"
    found = Measurements.from_text(stored.read_text())
    assert len(found.profiles) == 2
    assert found.model.parameters == 5634
    assert all(profile.seconds.most >= 32 for profile in found.profiles)
    (node,) = load_cluster(str(cluster)).nodes
    assert [device.kind for device in node.devices] == ["cpu", "cpu"]
    assert node.bus
    assert node.bus.rate_bytes_per_s > 1e7
    rooms = []
    for where in ((), ("--cluster", str(cluster))):
        planned = mimatrix("plan", "--profiles", str(stored), "--global-batch", "64", "--keep-all", "--json", *where)
        fields = json.loads(planned.stdout)
        assert sum(map(sum, fields["split"])) == 64
        rooms.append([rank["room_bytes"] for rank in fields["parts"]])
    assert rooms[0] == rooms[1]
