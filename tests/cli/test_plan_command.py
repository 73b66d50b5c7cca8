"""`mimatrix plan` as people use it: tables, files, pictures, and one sentence for bad input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_commands import mimatrix

from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Communication, Measurements, ModelSize, Profile

LAB = ("plan", "--cluster", "examples/lab.toml", "--profiles", "examples/lab_profiles.json")
MB = 10**6
MODEL = ModelSize("m-1", "small", 10**6, 4 * MB, 4 * MB, 8 * MB, MB)


def profile(device: str, rate: float, room: int = 1000 * MB, model: str = "m-1") -> Profile:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    seconds = Curve.of((size, 0.002 + size / rate) for size in sizes)
    return Profile(device, model, seconds, Curve.of((size, MB * size) for size in sizes), room, 0.001)


def stored(folder: Path, *profiles: Profile, name: str = "profile.json", model: ModelSize = MODEL) -> str:
    paid = Communication.of(0.004, 0.002, 0.002, "measured")
    path = folder / name
    path.write_text(Measurements(model, profiles, paid).to_text())
    return str(path)


def refused(*words: str) -> str:
    done = mimatrix(*words)
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("mimatrix: ")
    return line


def test_a_described_cluster_is_planned_drawn_and_stored(tmp_path: Path) -> None:
    picture, output = tmp_path / "plan.svg", tmp_path / "plan.json"
    done = mimatrix(*LAB, "--global-batch", "512", "--picture", str(picture), "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("big/0 A40", "memory used", "samples/s", "left out: old/0 2080 Ti", "would take"):
        assert word in done.stdout
    assert "communication" in picture.read_text()
    plan = Plan.from_text(output.read_text())
    assert plan.global_batch == 512
    assert [part.name for part in plan.parts] == ["pair/0 3090", "pair/1 3090", "big/0 A40"]
    assert all(part.memory_bytes <= part.room_bytes for part in plan.parts)
    assert [part.device for part in plan.parts] == ["NVIDIA GeForce RTX 3090"] * 2 + ["NVIDIA A40"]
    # The memory of the cluster file counts: an A40 has 48 GB.
    assert plan.parts[2].room_bytes == int(0.92 * 48e9)


def test_everyone_may_be_kept_and_the_stage_be_given() -> None:
    done = mimatrix(*LAB, "--global-batch", "512", "--keep-all", "--stage", "3", "--json")
    plan = Plan.from_text(done.stdout)
    assert (plan.stage, len(plan.parts), plan.left_out) == (3, 4, ())
    assert len({len(sizes) for sizes in plan.split.micro}) == 1


def test_what_if_there_were_two_more() -> None:
    done = mimatrix(*LAB, "--global-batch", "512", "--add", "RTX 3090:2")
    assert done.returncode == 0, done.stderr
    assert "2 x RTX 3090 added as node added on switch desk" in done.stdout.replace("\n", " ")
    assert "Before and after" in done.stdout
    fields = json.loads(mimatrix(*LAB, "--global-batch", "512", "--add", "RTX 3090:2", "--json").stdout)
    assert len(fields["parts"]) == len(fields["before"]["parts"]) + 2
    assert fields["samples_per_s"] > 1.2 * fields["before"]["samples_per_s"]


def test_measured_ranks_without_a_cluster(tmp_path: Path) -> None:
    """Four times as fast: about four times as many samples; and what a third one would bring."""
    file = stored(tmp_path, profile("cpu fast", 4000), profile("cpu slow", 1000))
    found = json.loads(mimatrix("plan", "--profiles", file, "--global-batch", "500", "--json").stdout)
    batches = [sum(sizes) for sizes in found["split"]]
    assert sum(batches) == 500
    assert 3 < batches[0] / batches[1] < 5
    done = mimatrix("plan", "--profiles", file, "--global-batch", "500", "--add", "cpu fast:1")
    assert "1 x cpu fast added to the 2 measured ranks, communication scaled" in done.stdout.replace("\n", " ")


def test_several_files_of_one_model(tmp_path: Path) -> None:
    one, other = (
        stored(tmp_path, profile("A", 1000), name="a.json"),
        stored(tmp_path, profile("B", 3000), name="b.json"),
    )
    done = mimatrix("plan", "--profiles", one, "--profiles", other, "--global-batch", "128", "--json")
    fields = json.loads(done.stdout)
    assert [part["name"] for part in fields["parts"]] == ["rank 0 A", "rank 1 B"]
    assert not fields["communication_known"]
    assert "(not measured: 2 files, each on its own)" in fields["reasons"][0]


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    """Neither do two ranks that were measured together say what three would pay."""
    pair = stored(tmp_path, profile("A", 1000), profile("A", 1000), name="a.json")
    other = stored(tmp_path, profile("B", 3000), name="b.json")
    steps = [
        json.loads(mimatrix("plan", "--profiles", one, "--profiles", two, "--global-batch", "128", "--json").stdout)
        for one, two in ((pair, other), (other, pair))
    ]
    assert steps[0]["step_s"] == pytest.approx(steps[1]["step_s"])
    assert [each["communication_known"] for each in steps] == [False, False]


def test_communication_that_nobody_measured_is_said_to_be_unknown(tmp_path: Path) -> None:
    words = ("plan", "--profiles", "examples/lab_profiles.json", "--global-batch", "512", "--add", "3090:8")
    said = " ".join(mimatrix(*words).stdout.split())
    assert "(without communication), 309 samples/s at most" in said
    assert "communication is unknown (not measured: one card at a time) and counted as nothing" in said
    assert "communication unknown unknown" in said
    assert "up to 4.12x" in said
    assert "scaled from theirs" not in said
    alone = stored(tmp_path, profile("cpu", 1000))
    fields = json.loads(
        mimatrix("plan", "--profiles", alone, "--global-batch", "64", "--add", "cpu:3", "--json").stdout
    )
    assert (fields["communication_known"], fields["before"]["communication_known"]) == (False, True)
    assert "not measured: one rank alone" in fields["reasons"][0]
    assert fields["added"] == ["3 x cpu added to the measured rank, communication unknown"]


def test_communication_that_is_known_is_not_doubted(tmp_path: Path) -> None:
    file = stored(tmp_path, profile("A", 1000), profile("B", 1000))
    for words in (("--profiles", file), LAB[1:]):
        fields = json.loads(mimatrix("plan", *words, "--global-batch", "512", "--keep-all", "--json").stdout)
        assert fields["communication_known"]
        assert not any("unknown" in reason for reason in fields["reasons"])


def test_a_family_without_kinds_is_of_the_one_kind_measured(tmp_path: Path) -> None:
    file = stored(tmp_path, profile("NVIDIA A40", 3000))
    done = mimatrix("plan", "--cluster", "star:4", "--profiles", file, "--global-batch", "256", "--json")
    assert [sum(sizes) for sizes in json.loads(done.stdout)["split"]] == [64] * 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--global-batch", "0"), "use 1 or more"),
        (("--global-batch", "8", "--stage", "4"), "use auto, 0, 1, 2 or 3"),
        (("--global-batch", "8", "--add", "3090:0"), "write a kind and a number"),
        (("--global-batch", "8", "--add", ":2"), "write a kind and a number"),
        (("--global-batch", "8", "--add", "RTX 3080"), 'did you mean "RTX 3090"?'),
        (("--global-batch", "8", "--add", "H200"), "or measure it: mimatrix profile"),
        (("--global-batch", "8", "--picture", "x.gif"), "use .png or .svg"),
        (("--global-batch", "8", "--output", "x.txt"), "use .json"),
        (("--global-batch", "8", "--profiles", "nowhere.json"), 'there is no file "nowhere.json"; make it with'),
        (("--global-batch", "8", "--profiles", "examples/lab.toml"), "is not a profile; make one with"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(*LAB, *words)


def test_an_edited_profile_is_one_sentence(tmp_path: Path) -> None:
    file = Path(stored(tmp_path, profile("A", 1000)))
    fields = json.loads(file.read_text())
    fields["profiles"][0]["seconds"] = [[1, 0.0]]
    for text in (json.dumps(fields), "[" * 100_000):
        file.write_text(text)
        assert str(file) in refused("plan", "--profiles", str(file), "--global-batch", "8")


def test_a_profile_for_another_model_is_refused(tmp_path: Path) -> None:
    one = stored(tmp_path, profile("A", 1000), name="a.json")
    model = replace(MODEL, fingerprint="m-2", name="large")
    other = stored(tmp_path, profile("B", 1000, model="m-2"), name="b.json", model=model)
    said = refused("plan", "--profiles", one, "--profiles", other, "--global-batch", "8")
    assert "is a profile for another model (large)" in said
    assert said.endswith("measure both with the same script: mimatrix profile script.py")


def test_a_cluster_with_an_unknown_device_is_refused(tmp_path: Path) -> None:
    text = Path("examples/lab.toml").read_text().replace("A40", "A4000")
    (tmp_path / "lab.toml").write_text(text)
    words = ("--cluster", str(tmp_path / "lab.toml"), "--profiles", "examples/lab_profiles.json")
    said = refused("plan", *words, "--global-batch", "8")
    assert 'the device "A4000" was not measured (measured: NVIDIA A40, ' in said


def test_what_does_not_fit_names_who_lacks_what(tmp_path: Path) -> None:
    file = stored(tmp_path, profile("A", 1000, room=5 * MB), profile("B", 1000, room=6 * MB))
    said = refused("plan", "--profiles", file, "--global-batch", "64")
    assert "rank " in said
    assert "B" in said
