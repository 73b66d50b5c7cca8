"""What can be asked for, and the sentences for what cannot."""

import sys
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.launch import RunSpec, module_command, parse_memory, parse_speeds, script_command, validate_run


def test_speeds() -> None:
    assert parse_speeds("1,0.5, .25") == (1.0, 0.5, 0.25)


@pytest.mark.parametrize("text", ["0", "1.5", "-1", "nan", "inf", "1,,1", "fast", "1;1"])
def test_bad_speeds(text: str) -> None:
    with pytest.raises(UserError, match=r"; (use|write)"):
        parse_speeds(text)


def test_memory() -> None:
    assert parse_memory("2GB,512MiB", 2) == (2 * 10**9, 512 << 20)
    assert parse_memory("1GB", 3) == (10**9,) * 3


@pytest.mark.parametrize("text", ["0", "1GB,", "-1GB", "lots", "1GB;1GB", "1MB", "1e999GB"])
def test_bad_memory(text: str) -> None:
    with pytest.raises(UserError, match=r"; (use|write)"):
        parse_memory(text, 2)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (RunSpec(("x",), ranks=0), "use -n 1"),
        (RunSpec(("x",), ranks=-3), "use -n 1"),
        (RunSpec(("x",), ranks=3, speeds=(1, 1)), "--speeds has 2 numbers for 3 ranks; give one for each"),
        (
            RunSpec(("x",), ranks=3, memory=(1, 1)),
            "--memory has 2 sizes for 3 ranks; give one for each, or one for all",
        ),
        (RunSpec(("x",), max_restarts=-1), "use --max-restarts 0"),
        (RunSpec(("x",), threads=0), "use --threads 1"),
        (RunSpec(("x",), slow_by="quotas"), 'did you mean "quota"'),
    ],
)
def test_what_cannot_be_run(launch: RunSpec, said: str) -> None:
    with pytest.raises(UserError, match=said):
        validate_run(launch)


def test_scripts_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__main__.py").touch()
    assert script_command("train.py", ["--lr", "1"]) == (sys.executable, "-u", "train.py", "--lr", "1")
    assert script_command("job", []) == (sys.executable, "-u", "job")
    assert module_command("job", ["a"]) == (sys.executable, "-u", "-m", "job", "a")
    assert module_command("json.tool", []) == (sys.executable, "-u", "-m", "json.tool")
    for missing in ("nope.py", ".", str(tmp_path)):
        with pytest.raises(UserError, match="there is no script"):
            script_command(missing, [])
    with pytest.raises(UserError, match="use -m"):
        script_command("json.tool", [])
    for missing in ("nope", "nope.more", "", "./x"):
        with pytest.raises(UserError, match="there is no module"):
            module_command(missing, [])
