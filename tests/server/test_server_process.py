"""A real server, real processes: from handing in to done, through kills and preemption."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.namespaces import needs_root
from support.servers import SCRIPTS, ServerProcess, server

from mimatrix.api.client import Client
from mimatrix.api.models import ENDED, JobState
from mimatrix.core.errors import UserError


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server(tmp_path_factory.mktemp("server") / "data") as found:
        yield found


@pytest.mark.timeout(120)
@pytest.mark.wording
def test_from_handing_in_to_done(up: ServerProcess) -> None:
    number = up.submit("hello.py", "--devices", "2", "--name", "first", "--", "--lr", "0.1")
    waited = up.command("wait", str(number))
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert f"job {number} is done: all ranks ended well" in waited.stdout
    for rank in (0, 1):
        assert up.command("logs", str(number), "--rank", str(rank)).stdout == f"rank {rank} of 2 --lr 0.1\n"
    explained = up.command("explain", str(number)).stdout
    assert [line.split()[2] for line in explained.splitlines()] == [
        "queued",
        "starting",
        "done",
    ] or "training" in explained
    shown = json.loads(up.command("show", str(number), "--json").stdout)
    assert (shown["name"], shown["state"], shown["exit_code"]) == ("first", "done", 0)
    assert str(number) in up.command("jobs", "--all").stdout


@pytest.mark.timeout(120)
@pytest.mark.wording
def test_a_job_that_fails_says_who_and_how(up: ServerProcess) -> None:
    number = up.submit("failing.py")
    waited = up.command("wait", str(number))
    assert waited.returncode == 1
    assert "rank 0 on " in waited.stdout
    assert "ended with exit code 1" in waited.stdout
    assert "nothing to see here" in up.command("logs", str(number)).stdout


@pytest.mark.long
@pytest.mark.timeout(120)
def test_cancelling_ends_the_processes(up: ServerProcess) -> None:
    number = up.submit("patient.py", "--", "301.5")
    up.until(number, lambda job: job.state is JobState.TRAINING)
    assert "told to end" in up.command("cancel", str(number)).stdout
    job = up.until(number, lambda job: job.state in ENDED)
    assert job.state is JobState.CANCELLED
    assert _running("301.5") == []


@pytest.mark.timeout(120)
@pytest.mark.long
def test_following_goes_on_through_another_start(up: ServerProcess) -> None:
    number = up.submit("failing.py", "--retries", "1", "--", "4")
    followed = up.command("logs", "-f", str(number))
    assert followed.stdout == "nothing to see here\n" * 2
    assert "started for the 2. time" in followed.stderr


@pytest.mark.timeout(120)
@pytest.mark.long
def test_who_waits_is_told_why_and_a_limit_ends(up: ServerProcess) -> None:
    first = up.submit("patient.py", "--devices", "all", "--max-time", "14s", "--", "300")
    up.until(first, lambda job: job.state is JobState.TRAINING)
    second = up.submit("hello.py")
    waiting = up.until(second, lambda job: bool(job.reason))
    assert waiting.reason.startswith("needs 1 x cpu, none free; first in line when job ")
    would = up.command("submit", str(SCRIPTS / "hello.py"), "--dry-run", "--devices", "99")
    assert would.stdout.startswith("it would wait: needs 99 x cpu, and the cluster has 3 x cpu")
    assert up.until(first, lambda job: job.state in ENDED).reason == "its time limit of 14s was over"
    assert up.until(second, lambda job: job.state in ENDED).state is JobState.DONE


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_job_file_a_kind_that_nobody_has_and_what_is_not_shown(up: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "job.toml").write_text('script = "train.py"\ndevices = 2\nmax_time = "1h30m"\npriority = 1\n')
    would = up.command("submit", "--dry-run", str(tmp_path / "job.toml"), "--devices", "a100:1,cpu:1")
    assert would.stdout.startswith("it would wait: ")
    warning = "mimatrix: no node has a device of the kind a100, so it will wait for one; there are cpu\n"
    assert would.stderr == warning
    done = up.command("submit", str(tmp_path / "job.toml"), "--devices", "a100:1", "--json")
    assert (done.returncode, done.stderr) == (0, warning)
    number = json.loads(done.stdout)["id"]
    fine = up.command("submit", str(tmp_path / "job.toml"), "--max-time", "2d", "--json")
    assert (fine.stderr, json.loads(fine.stdout)["devices"]) == ("", "2")
    assert json.loads(fine.stdout)["max_time_s"] == 172_800
    assert up.command("priority", str(number), "80").stdout == f"job {number} has priority 80\n"
    assert json.loads(up.command("priority", str(number), "7", "--json").stdout)["priority"] == 7
    listed = up.command("jobs", "--all", "--most", "1")
    found = re.fullmatch(
        r"mimatrix: (\d+) older ones are not shown; add --most (\d+) to see all of them\n", listed.stderr
    )
    assert found, listed.stderr
    assert int(found[2]) == int(found[1]) + 1
    every = up.command("jobs", "--all", "--json", "--most", found[2])
    assert (every.stderr, len(json.loads(every.stdout))) == ("", int(found[2]))
    assert up.command("cancel", str(number)).returncode == 0


@pytest.mark.timeout(120)
@pytest.mark.long
def test_tokens_are_made_listed_and_revoked(up: ServerProcess) -> None:
    made = up.command("tokens", "add", "ben", "--role", "viewer")
    found = re.fullmatch(r"token (\d+) of ben \(viewer\), shown this once: (mm_\S+)\n", made.stdout)
    assert found, made
    for words in (("tokens",), ("tokens", "list"), ("tokens", "--json"), ("tokens", "list", "--json")):
        listed = up.command(*words).stdout
        assert "ben" in listed
        assert "secret" not in listed
        assert found[2] not in listed
    address = (up.data / "address").read_text().strip()
    with Client(address, found[2]) as client:
        assert client.jobs().jobs is not None
    assert up.command("tokens", "revoke", found[1]).stdout == f"token {found[1]} is revoked\n"
    with Client(address, found[2]) as client, pytest.raises(UserError, match="not known"):
        client.jobs()
    again = up.command("tokens", "revoke", found[1])
    assert (again.returncode, again.stderr) == (2, f"mimatrix: there is no token {found[1]}; see mimatrix tokens\n")
    assert json.loads(up.command("tokens", "add", "cho", "--json").stdout)["role"] == "user"


def test_memory_of_nodes_is_short(up: ServerProcess) -> None:
    lines = up.command("nodes").stdout.splitlines()
    assert any(re.search(r"cpu +[\d.]{1,4}[MGT]i?B +(free|job \d+)", line) for line in lines), lines


def test_files_of_the_server_are_for_its_user_alone(up: ServerProcess) -> None:
    assert stat.S_IMODE((up.data / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(up.data.stat().st_mode) == 0o700
    token = (up.data / "token").read_text().strip()
    assert stat.S_IMODE((up.data / "lock").stat().st_mode) == 0o600
    assert token not in up.said(), "its output is a file, which others may read"
    assert f"(admin) is in {up.data}/token" in up.said()
    assert token.encode() not in (up.data / "mimatrix.db").read_bytes()


@pytest.mark.wording
def test_two_servers_do_not_share_a_folder(up: ServerProcess) -> None:
    words = [sys.executable, "-m", "mimatrix.cli.main", "up", "--data", str(up.data), "--port", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "another server uses" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("submit", "nothing.py"), 'there is no "nothing.py"'),
        (("submit", str(SCRIPTS)), "is a directory; give the path of a script"),
        (("submit", str(SCRIPTS / "hello.py"), "--devices", "x"), 'devices: "x" names no devices'),
        (("submit", str(SCRIPTS / "hello.py"), "--env", "x"), '"x" is not a variable'),
        (("show", "9999"), "there is no job 9999; see mimatrix jobs"),
        (("tokens", "add", "b@d"), '"b@d" is not a valid user name; use up to 100 letters'),
        (("submit", str(SCRIPTS / "hello.py"), "--max-time", "30m1h"), '"30m1h" is not a time; write for example 90s'),
        (("jobs", "--state", "don"), 'unknown state "don"; did you mean "done"?'),
    ],
)
@pytest.mark.wording
def test_bad_input_is_one_sentence(up: ServerProcess, words: tuple[str, ...], sentence: str) -> None:
    done = up.command(*words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.wording
def test_nobody_there(tmp_path: Path) -> None:
    environment = {**os.environ, "MIMATRIX_DATA": str(tmp_path), "MIMATRIX_SERVER": "", "MIMATRIX_TOKEN": ""}
    words = [sys.executable, "-m", "mimatrix.cli.main", "jobs"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        2,
        "mimatrix: no job server is known; start one with `mimatrix up`, or set MIMATRIX_SERVER\n",
    )
    environment["MIMATRIX_SERVER"] = "http://127.0.0.1:9"
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "does not answer" in done.stderr


@pytest.mark.timeout(180)
def test_a_killed_server_loses_nothing(tmp_path: Path) -> None:
    with server(tmp_path / "data") as up:
        numbers = [up.submit("patient.py", "--", seconds) for seconds in ("8", "10", "12")]
        for number in numbers:
            up.until(number, lambda job: job.state is JobState.TRAINING)
        for _ in range(2):
            up.kill(signal.SIGKILL)
            time.sleep(1.5)
            up.start()
        for number in numbers:
            assert up.until(number, lambda job: job.state in ENDED).state is JobState.DONE
        for number in numbers:
            with up.client() as client:
                events = client.events(number)
                text = "".join(part for part in _log(up, number))
            states = [event.state for event in events]
            assert (
                states.count(JobState.STARTING) == states.count(JobState.DONE) == states.count(JobState.TRAINING) == 1
            )
            ticks = [int(line.split()[1]) for line in text.splitlines() if line.startswith("tick")]
            assert ticks == list(range(1, len(ticks) + 1)), "training did not pause, nor begin anew"


def _log(up: ServerProcess, number: int) -> Iterator[str]:
    offset = 0
    with up.client() as client:
        while (part := client.log(number, 0, offset)).text:
            offset = part.next_offset
            yield part.text


@pytest.mark.timeout(240)
def test_preempted_by_checkpoint_and_exact(tmp_path: Path) -> None:
    with server(tmp_path / "data", devices=2) as up:
        alone = up.submit("training.py", "--devices", "2", "--", "24", "0.0")
        assert up.until(alone, lambda job: job.state in ENDED, 120).state is JobState.DONE
        low = up.submit("training.py", "--devices", "2", "--preemptible", "--priority", "10", "--", "24", "0.35")
        up.until(low, lambda job: job.progress.step >= 5, 120)
        high = up.submit("hello.py", "--devices", "2", "--priority", "90")
        assert up.until(high, lambda job: job.state in ENDED, 120).state is JobState.DONE
        found = up.until(low, lambda job: job.state in ENDED, 120)
        assert found.state is JobState.DONE, up.command("logs", str(low)).stdout
        assert found.generation == 2
        with up.client() as client:
            assert JobState.PREEMPTED in [event.state for event in client.events(low)]
        first, second = (
            json.loads((up.data / "checkpoints" / f"job-{number}.losses").read_text()) for number in (alone, low)
        )
        assert len(first) == len(second) == 24
        assert max(abs(first[step] - second[step]) for step in first) < 1e-10
        _check_what_is_left(up, low, second)


def _check_what_is_left(up: ServerProcess, number: int, losses: dict[str, float]) -> None:
    """Check that the checkpoint it resumed from is listed, and TensorBoard reads its losses of both starts."""
    with up.client() as client:
        saved = client.checkpoints(number)
        log = client.log(number, 0, -5)
        assert log.text == client.log(number, 0, 0).text[-5:]
    assert saved
    assert all(Path(each.path).is_dir() and each.bytes > 0 and 5 <= each.step < 24 for each in saved)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(up.data / "checkpoints" / f"job-{number}" / "tensorboard"))
    found.Reload()
    assert {each.step: each.value for each in found.Scalars("loss")} == pytest.approx(
        {int(step): value for step, value in losses.items()}, rel=1e-6
    )
    assert found.Scalars("speed/samples_per_s")[-1].value > 0


def _running(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.encode() in each for each in words):
            found.append(path.parent.name)
    return found


@pytest.mark.long
@pytest.mark.timeout(120)
def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        timeout=60,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    words = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with server(tmp_path / "data", *words, devices=1) as up:
        assert (up.data / "address").read_text().startswith("https://")
        number = up.submit("hello.py")
        assert up.until(number, lambda job: job.state in ENDED).state is JobState.DONE
        monkeypatch.delenv("SSL_CERT_FILE")
        assert "does not answer" in up.command("jobs").stderr


@needs_root
@pytest.mark.wording
def test_a_read_only_directory_for_checkpoints_is_refused_at_the_start(tmp_path: Path) -> None:
    place = tmp_path / "read-only"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)], check=True, timeout=20)
    try:
        words = [sys.executable, "-m", "mimatrix.cli.main", "up", "--data", str(tmp_path / "data")]
        done = subprocess.run([*words, "--checkpoints", str(place)], capture_output=True, text=True, timeout=60)
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=20)
    assert (done.returncode, str(place) in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--host", "0.0.0.0"), "0.0.0.0 is reachable from other machines"),
        (("--tls-cert", "x.pem"), "TLS needs a certificate and its key"),
        (("--tls-cert", "x.pem", "--tls-key", "y.pem"), '"x.pem" is not there'),
        (("--tls-cert", __file__, "--tls-key", __file__), "holds no certificate in PEM format"),
        (("--database", "mysql://x@y/z"), "is of an unknown kind"),
        (("--python", "false"), 'MiMatrix is not installed for "false"'),
    ],
)
@pytest.mark.wording
def test_what_cannot_be_served(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    command = [sys.executable, "-m", "mimatrix.cli.main", "up", "--data", str(tmp_path / "data"), "--port", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
