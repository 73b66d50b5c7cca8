"""The dashboard as people use it: a real server with real jobs, in a real browser."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from support.browsers import DESK, PHONE, browser, needs_browser, visit
from support.clusters import node
from support.servers import ServerProcess, server

from mimatrix.api.models import ACTIVE, ENDED, JobState, Role, TokenCreate

pytestmark = [needs_browser, pytest.mark.timeout(120)]
OURS = Path(__file__).parent / "scripts"
FOCUSED = "[document.activeElement.getBoundingClientRect().top, document.activeElement.href]"
LOG = {"generation": 1, "text": "", "next_offset": 0, "has_ended": False}
LONG = "import time\nprint(open('note.txt').read(), flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server(tmp_path_factory.mktemp("dashboard") / "data", devices=2) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


def origin(up: ServerProcess) -> str:
    return f"http://127.0.0.1:{up.port}"


def admin(up: ServerProcess) -> str:
    return (up.data / "token").read_text().strip()


def token(up: ServerProcess, user: str, role: Role) -> str:
    with up.client() as client:
        return client.create_token(TokenCreate(user=user, role=role)).secret


@contextmanager
def running(up: ServerProcess, script: str, *words: str) -> Iterator[int]:
    """Yield the number of a job that has devices, and end the job afterwards."""
    number = up.submit(script, *words)
    try:
        up.until(number, lambda job: job.state in ACTIVE)
        yield number
    finally:
        with up.client() as client:
            if client.job(number).state not in ENDED:
                client.act(number, "cancel")
        up.until(number, lambda job: job.state in ENDED)


def test_signing_in_and_out(up: ServerProcess, chromium: Browser) -> None:
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        seen.go("")
        page.get_by_label("Token").fill("mm_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_have_text("The server does not know this token.")
        page.get_by_label("Token").fill(admin(up))
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
        assert page.evaluate("localStorage.length") == 0
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        assert page.evaluate("sessionStorage.length + localStorage.length") == 0
        seen.sign_in(admin(up))
        assert admin(up) not in page.url
        assert "token" not in page.evaluate("JSON.stringify(history.state) + location.href")


def test_a_link_with_another_token_asks_before_it_signs_in(up: ServerProcess, chromium: Browser) -> None:
    other = token(up, "eve", Role.USER)
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        seen.sign_in(admin(up))
        seen.go(f"#token={other}")
        page.get_by_role("button", name="Stay signed in").click()
        expect(page.locator("#name")).to_contain_text("admin")
        assert page.evaluate("sessionStorage['mimatrix-token']") == admin(up)
        assert other not in page.url
        seen.go(f"#token={other}")
        page.get_by_role("button", name="Use the other token").click()
        expect(page.locator("#name")).to_have_text("eve · user")


@pytest.mark.parametrize("size", [DESK, pytest.param(PHONE, marks=pytest.mark.long)], ids=["desk", "phone"])
@pytest.mark.wording
def test_a_job_is_handed_in_waits_with_a_reason_moves_and_is_cancelled(
    up: ServerProcess, chromium: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    (tmp_path / "long.py").write_text(LONG)
    (tmp_path / "note.txt").write_text("carried along in äöü " + "x" * 600)
    with visit(chromium, origin(up), size) as seen:
        page = seen.page
        seen.sign_in(admin(up))

        def hand_in(name: str) -> int:
            page.get_by_role("navigation", name="Pages").get_by_role("link", name="Submit").click()
            page.get_by_label("Script").set_input_files(tmp_path / "long.py")
            page.get_by_label("Further files").set_input_files(tmp_path / "note.txt")
            page.get_by_label("Name").fill(name)
            page.get_by_label("Devices").fill("2")
            page.get_by_role("button", name="Dry run").click()
            expect(page.get_by_text("It would ")).to_be_visible()
            assert not seen.is_wider_than_the_screen()
            page.get_by_role("button", name="Submit", exact=True).click()
            page.wait_for_url(re.compile(r"#/jobs/\d+$"))
            return int(page.url.rpartition("/")[2])

        first = hand_in("first")
        expect(page.get_by_role("region", name="Output", exact=True).last).to_contain_text("carried along in äöü")
        expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("A script saves with run.save()")
        second = hand_in("second")
        expect(page.locator(".why")).to_contain_text("Waiting: Needs 2 x cpu")
        page.get_by_role("button", name="Priority").click()
        page.get_by_label("From 0 to 100").fill("77")
        page.get_by_role("button", name="Change").click()
        expect(page.get_by_text(f"Job {second} has priority 77.")).to_be_visible()
        assert not seen.is_wider_than_the_screen()

        page.get_by_role("link", name="All jobs").click()
        waiting = page.get_by_role("region", name="Waiting").get_by_role("listitem")
        expect(waiting).to_contain_text("1st in the queue")
        expect(waiting).to_contain_text("priority 77")
        expect(waiting).to_contain_text("needs 2 x cpu")
        assert not seen.is_wider_than_the_screen()
        for number in (second, first):
            seen.go(f"#/jobs/{number}")
            _cancel(page)
        expect(page.get_by_role("button", name="Requeue")).to_be_visible()
    assert up.until(first, lambda job: job.state in ENDED).state is JobState.CANCELLED


@pytest.mark.wording
def test_a_job_that_trains_is_watched_until_it_is_cancelled(up: ServerProcess, chromium: Browser) -> None:
    with running(up, str(OURS / "watched.py"), "--devices", "2") as number, visit(chromium, origin(up)) as seen:
        page = seen.page
        up.until(number, lambda job: job.progress.step > 60)
        seen.sign_in(admin(up))
        seen.go("#/cluster")
        link = page.get_by_role("listitem").filter(has=page.get_by_role("article")).locator(".carried")
        expect(link).to_have_text(re.compile(r"^[\d.]+ [kM]?B/s in.*[\d.]+ [kM]?B/s out"))
        expect(page.get_by_role("img", name=re.compile(r"\d+ % busy, moves [\d.]+ [kM]?B.s"))).to_have_count(2)

        seen.go(f"#/jobs/{number}")
        curve = page.get_by_role("img", name=re.compile("^loss: from"))
        before = curve.get_attribute("aria-label")
        assert before
        expect(page.get_by_role("img", name=re.compile("^Samples.s: from"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile(r"^Rank 1: .*computing \d+ %, communicating"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile(r"^Rank 1: .*computing [\d.]+ ms"))).to_be_visible()
        step = page.locator(".figures dd").first
        expect(step).not_to_have_text(step.inner_text())
        expect(curve).not_to_have_attribute("aria-label", before)

        saved = page.get_by_role("region", name="Checkpoints")
        expect(saved).to_contain_text(re.compile(r"it resumes from step \d+\."))
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        saved.get_by_role("button", name="Copy").first.click()
        expect(page.get_by_text("Path copied.")).to_be_visible()
        copied = Path(page.evaluate("navigator.clipboard.readText()"))
        assert copied.parent == up.data / "checkpoints" / f"job-{number}"

        (copied.parent / "slow").touch()
        expect(page.get_by_role("alert").filter(has_text="Straggler.")).to_contain_text("because of rank 1 on ")
        expect(page.locator("li.slow")).to_contain_text("slow: compute")
        page.get_by_text("Time", exact=True).click()
        expect(curve).to_be_visible()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert seen.barriers() == []
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert not seen.is_wider_than_the_screen()
        _cancel(page)
        expect(saved).to_contain_text(re.compile(r"“Requeue” resumes from step \d+\."))


@pytest.mark.long
def test_groups_are_seen_each_for_itself(up: ServerProcess, chromium: Browser) -> None:
    with running(up, "in_groups.py", "--groups", "0/1") as number, visit(chromium, origin(up)) as seen:
        page = seen.page
        up.until(number, lambda job: job.progress.step > 20)
        seen.sign_in(admin(up))
        seen.go(f"#/jobs/{number}")
        groups = page.get_by_role("region", name="Groups")
        expect(groups.get_by_role("row")).to_have_count(3)
        pushes = groups.get_by_role("row").nth(2).get_by_role("cell").nth(1)
        expect(pushes).to_have_text(re.compile(r"^\d+$"))
        expect(pushes).not_to_have_text(pushes.inner_text())
        expect(page.get_by_text("the others wait for it")).to_have_count(0)
        assert seen.barriers() == []
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert not seen.is_wider_than_the_screen()
        _cancel(page)
        expect(groups).to_contain_text("2 groups, training asynchronously.")
        expect(groups.get_by_role("row")).to_have_count(2)  # a narrow screen has no heads


@pytest.mark.wording
def test_everybody_can_use_every_view(up: ServerProcess, chromium: Browser) -> None:
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        seen.go("")
        page.get_by_label("Token").wait_for()
        assert seen.barriers() == []
        seen.sign_in(admin(up))
        name = page.evaluate(
            "fetch('api/nodes', {headers: {Authorization: 'Bearer ' + sessionStorage['mimatrix-token']}})"
            ".then(answer => answer.json()).then(nodes => nodes[0].name)"
        )
        for route, ready in (
            ("#/", ".meter"),
            ("#/cluster", ".device"),
            (f"#/cluster/{name}/0", ".lists > p"),
            ("#/submit", "form.card"),
            ("#/jobs/99999", "[role=alert]"),
        ):
            seen.go(route)
            page.wait_for_selector(ready)
            for size in (DESK, PHONE):
                page.set_viewport_size({"width": size[0], "height": size[1]})
                assert not seen.is_wider_than_the_screen(), route
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert seen.barriers() == [], f"{route} {scheme}"
        expect(page.get_by_text("There is no job 99999; see mimatrix jobs.")).to_be_visible()
        page.reload()
        page.get_by_role("heading", name="Error").wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"


def test_a_long_output_is_read_from_its_end_by_one_who_only_looks(up: ServerProcess, chromium: Browser) -> None:
    hangs = "rank 1 on n/1 has not entered all_reduce"
    trouble = {"kind": "hang", "rank": 1, "device": "n/1", "cause": "", "lost_s": 9.0, "sentence": hangs}
    ranks = [_rank(rank, busy) for rank, busy in enumerate((0.010, 0.030, 0.011))]
    elsewhere = {"path": "/elsewhere/step-320", "step": 320, "saved_at": "2026-01-01T00:00:00Z", "bytes": 5 << 20}
    with running(up, str(OURS / "loud.py")) as number, visit(chromium, origin(up)) as seen:
        page = seen.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/log?" in request.url else None)
        page.route("**/api/jobs/*/ranks", lambda route: _answer(route, {"ranks": ranks, "stragglers": [trouble]}))
        page.route("**/api/jobs/*/checkpoints", lambda route: _answer(route, [elsewhere]))
        with up.client() as client:
            while "tick" not in client.log(number, 0, -100).text:
                time.sleep(0.1)
        seen.sign_in(token(up, "vera", Role.VIEWER))
        expect(page.get_by_role("link", name="Submit")).to_have_count(0)
        seen.go(f"#/jobs/{number}")
        output = page.locator(".log")
        expect(output).to_contain_text(re.compile(r"tick \d+\n$"))
        expect(output).to_contain_text(f"Only the end is shown. For all output: mimatrix logs {number} --rank 0")
        assert re.match(r"line \d+ ·{80}\nline", output.locator("pre").inner_text())
        assert len(asked) < 10
        assert "offset=-65536" in asked[0]
        last = output.locator("pre").inner_text()
        expect(output.locator("pre")).not_to_have_text(last, use_inner_text=True)

        saved = page.get_by_role("region", name="Checkpoints")
        expect(saved).to_contain_text("a restart resumes from them only with run.load(directory)")
        expect(saved.get_by_role("row").last).to_contain_text(
            re.compile(r"^320\d+ d \d+ h ago .*5.0 MiB/elsewhere/step-320Copy$")
        )
        expect(page.get_by_role("alert").filter(has_text="Ranks are waiting.")).to_contain_text("R" + hangs[1:])
        expect(page.get_by_text("Rank 1 is busy longest, 30.0 ms")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        page.context.set_offline(True)
        expect(page.get_by_text("The server does not answer.")).to_be_visible()
        page.context.set_offline(False)
        page.get_by_role("button", name="Try now").click()
        expect(page.get_by_text("The server does not answer.")).to_be_hidden()
        seen.go("#/submit")
        expect(page.get_by_text("Viewers cannot submit jobs.")).to_be_visible()


def test_the_rank_that_failed_is_read_first_and_none_into_another(up: ServerProcess, chromium: Browser) -> None:
    number = up.submit(str(OURS / "broken.py"), "--devices", "2")
    up.until(number, lambda job: job.state in ENDED)
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        missed: list[str] = []
        page.on("response", lambda answer: missed.append(answer.url) if answer.status == 404 else None)
        seen.sign_in(admin(up))
        seen.go(f"#/jobs/{number}")
        output, rank = page.locator(".log pre"), page.get_by_label("Rank", exact=True)
        expect(output).to_have_text("rank 1 100%\nrank 1 is ready\nnothing to see here\n", use_inner_text=True)
        expect(rank).to_have_value("1")
        rank.select_option("0")
        expect(output).to_have_text("rank 0 100%\nrank 0 is ready\n", use_inner_text=True)
        expect(page.locator(".figures")).to_contain_text("had 2 deviceson ")
        expect(page.locator(".facts").last).to_contain_text(re.compile("Devices held.*/0 .*/1"))
        assert missed == []


def test_what_is_not_finite_and_what_is_too_much(up: ServerProcess, chromium: Browser) -> None:
    names = ("loss", *(f"more-{number}" for number in range(11)))
    losses = (5.0, 4.0, None, 3.0, None, None)
    points = [
        {
            "at": f"2026-01-01T00:00:{at:02}Z", "step": at + 1, "samples_per_s": 9.0, "step_s": 0.1,
            "predicted_step_s": None, "metrics": {**dict.fromkeys(names, 1.5e12), "loss": loss}, "ranks": {},
        }
        for at, loss in enumerate(losses)
    ]  # fmt: skip
    progress = {"step": 6, "epoch": 0, "samples_per_s": 9.0, "step_s": 0.1, "metrics": {"loss": None}}
    job = _job(1) | {"state": "training", "generation": 1, "allocation": ["n/0"], "progress": progress}
    late = {"kind": "hang", "rank": 60, "device": "n/60", "cause": "", "lost_s": 31.0, "sentence": "rank 60 is late"}
    ranks = [_rank(rank, 0.02 if rank == 40 else 0.01) for rank in range(64)]
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        answers = {"": job, "/history*": {"every_s": 1, "points": points}, "/events": [], "/checkpoints": []}
        answers |= {"/ranks": {"ranks": ranks, "stragglers": [late]}, "/log*": LOG}
        for path, content in answers.items():
            page.route(f"**/api/jobs/1{path}", lambda route, _, content=content: _answer(route, content))
        seen.sign_in(admin(up))
        seen.go("#/jobs/1")
        expect(page.get_by_role("img", name="loss: from 5 to nan")).to_be_visible()
        expect(page.locator(".figures")).to_contain_text("lossnan")
        expect(page.locator(".chart").first).to_have_text("lossnan", use_inner_text=False)
        expect(page.get_by_role("img", name="more-6: from 1.50e+12 to 1.50e+12")).to_be_visible()
        expect(page.locator(".charts .chart")).to_have_count(8 + 2)
        curves = page.get_by_role("region", name="Metrics")
        expect(curves).to_contain_text("And 4 more metrics.")
        curves.get_by_role("button", name="Show all").click()
        expect(page.locator(".charts .chart")).to_have_count(12 + 2)

        expect(page.get_by_role("alert").filter(has_text="Hang.")).to_contain_text("Rank 60 is late.")
        bars = page.locator(".ranks li")
        expect(bars).to_have_count(16)
        expect(bars.nth(0)).to_contain_text(re.compile(r"^Rank 60 n/60hangssaid \d+ d \d+ h ago"))
        expect(bars.nth(1)).to_contain_text("Rank 40")
        expect(bars.nth(2)).to_contain_text("Rank 0")
        page.locator(".card", has=bars).get_by_role("button", name="Show all").click()
        expect(bars).to_have_count(64)
        expect(page.locator(".lane")).to_have_count(64)
        assert seen.barriers() == []


def test_validations_are_curves_at_their_steps_between_the_losses(up: ServerProcess, chromium: Browser) -> None:
    def point(at: int, step: int, speed: float | None, **metrics: float | None) -> dict[str, Any]:
        return {
            "at": f"2026-01-01T00:00:{at:02}Z", "step": step, "samples_per_s": speed, "step_s": speed and 1 / speed,
            "predicted_step_s": None, "metrics": metrics, "ranks": {},
        }  # fmt: skip

    points = [
        point(0, 0, None, val=9.0),
        point(1, 5, 10.0, loss=3.0),
        point(2, 7, None, val=4.0),
        point(3, 7, 20.0, loss=2.0),
        point(4, 14, None, val=2.5),
        point(5, 14, None, test=0.25),
    ]
    progress = {"step": 14, "epoch": 2, "samples_per_s": 9.0, "step_s": 0.1, "metrics": {"loss": 2.0, "val": 2.5}}
    job = _job(1) | {"state": "training", "generation": 1, "allocation": ["n/0"], "progress": progress}
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        answers = {"": job, "/history*": {"every_s": 1, "points": points}, "/events": [], "/checkpoints": []}
        answers |= {"/ranks": {"ranks": [], "stragglers": []}, "/log*": LOG}
        for path, content in answers.items():
            page.route(f"**/api/jobs/1{path}", lambda route, _, content=content: _answer(route, content))
        seen.sign_in(admin(up))
        seen.go("#/jobs/1")
        for x in ("Steps", "Time"):
            page.get_by_text(x, exact=True).click()
            expect(page.get_by_role("img", name="val: from 9 to 2.5", exact=True)).to_be_visible()
            expect(page.get_by_role("img", name="loss: from 3 to 2", exact=True)).to_be_visible()
            expect(page.get_by_role("img", name="test: from 0.25 to 0.25", exact=True)).to_be_visible()
            expect(page.get_by_role("img", name="Samples/s: from 10 to 20", exact=True)).to_be_visible()
        assert seen.barriers() == []


@pytest.mark.parametrize("submitted", [[[0, 2], [1]], []], ids=["submitted", "formed"])
def test_groups_of_an_ended_job_are_those_that_it_had(
    up: ServerProcess, chromium: Browser, submitted: list[Any]
) -> None:
    """They were guessed from which ranks push: the ranks of a group need not follow one another."""
    formed = {} if submitted else {"group": [0.0, 1.0, 0.0]}
    times = {name: [0.1] * 3 for name in ("compute_s", "data_s", "communication_s", "waiting_s")}
    pushes = {f"group_{name}": [5.0, 7.0, None] for name in ("pushes", "samples", "staleness", "moved_s", "waited_s")}
    point = {
        "at": "2026-01-01T00:00:00Z", "step": 9, "samples_per_s": 1.0, "step_s": 0.4, "predicted_step_s": None,
        "metrics": {}, "ranks": {**times, **pushes, **formed},
    }  # fmt: skip
    ended = {"started_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:01:00Z", "exit_code": 0}
    job = _job(1) | {"state": "done", "generation": 1, "groups": submitted, **ended}
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        answers = {"": job, "/history*": {"every_s": 1, "points": [point]}, "/events": [], "/checkpoints": []}
        answers |= {"/ranks": {"ranks": [], "stragglers": []}, "/log*": LOG}
        for path, content in answers.items():
            page.route(f"**/api/jobs/1{path}", lambda route, _, content=content: _answer(route, content))
        seen.sign_in(admin(up))
        seen.go("#/jobs/1")
        groups = page.get_by_role("region", name="Groups")
        expect(groups.get_by_role("row").nth(1)).to_contain_text("0, 2")


def test_a_device_over_the_day_by_the_servers_clock(up: ServerProcess, chromium: Browser) -> None:
    now = datetime.now(UTC)
    use = [
        {"at": (now - timedelta(hours=hours)).isoformat(), "busy": busy, "memory_bytes": (3 << 30) if busy else None}
        for hours, busy in ((4, 0.5), (3, 0.75), (2, None), (1, 0.25))
    ]
    past = {"id": 1, "name": "x", "user": "ann", "state": "training", "ended_at": None}
    past["started_at"] = (now - timedelta(hours=4, seconds=30)).isoformat()
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        page.add_init_script("const real = Date.now; Date.now = () => real() + 5 * 3600 * 1000;")
        page.route("**/api/devices/**", lambda route: _answer(route, {"device": "x", "jobs": [past]}))
        page.route("**/api/devices/*/0/usage*", lambda route: _answer(route, use))
        seen.sign_in(admin(up))
        seen.go("#/cluster/x/0")
        expect(page.get_by_role("img", name="Busy: from 50 % to 25 %")).to_be_visible()
        expect(page.get_by_role("img", name="Memory: from 3.0 GiB to 3.0 GiB")).to_be_visible()
        expect(page.get_by_role("row").last).to_contain_text("4 h 0 min")
        assert seen.barriers() == []
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert not seen.is_wider_than_the_screen()


def test_links_and_devices_are_drawn_with_what_they_carry(up: ServerProcess, chromium: Browser) -> None:
    nodes = [
        node("fast", 4, jobs=(7, 7, 7, 7), link=(1.12e9, 2.1e6, 1.25e9)),
        node("plain", 2, jobs=(7, 7), link=(850.0, 0.0, None)),
        node("idle", 8),
        node("gone", 1) | {"answers": False},
    ]
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        page.route("**/api/nodes", lambda route: _answer(route, nodes))
        seen.sign_in(admin(up))
        seen.go("#/cluster")
        links = page.locator(".spot")
        expect(links.nth(0)).to_contain_text("1.12 GB/s in, 90 %2.1 MB/s out, < 1 %of 1.25 GB/s")
        expect(links.nth(1)).to_contain_text("850 B/s in0 B/s outplain")
        expect(links.nth(2)).to_contain_text("no figures: no worker runs here")
        expect(links.nth(3)).to_contain_text("Does not answer; last seen ")
        thick = page.locator(".wire .in").evaluate_all("all => all.map(each => each.offsetHeight)")
        assert thick[0] > 2 * thick[1] > 0
        expect(page.get_by_role("img", name="50 % busy, moves 330 MB/s")).to_have_count(6)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert seen.barriers() == []

        nodes[:] = [node(f"n{each:02}", 8, jobs=(7,) * 8, link=(1e6 * each, 5e5, 1.25e9)) for each in range(63)]
        page.reload()
        expect(page.locator(".device")).to_have_count(504)
        page.evaluate("document.querySelector('[aria-label=\"Device n60/3\"]').focus()")
        before = page.evaluate(FOCUSED)
        nodes[59] = node("n59", 8)
        _ask_now(page)
        expect(page.locator(".spot").nth(59)).to_contain_text("no worker runs here")
        assert page.evaluate(FOCUSED) == before
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        page.reload()
        expect(page.locator(".device").first).to_be_hidden()
        page.get_by_text("8 of 504 devices free").click()
        expect(page.locator(".device").first).to_be_visible()
        assert not seen.is_wider_than_the_screen()


def test_a_thousand_jobs_stay_where_they_are(up: ServerProcess, chromium: Browser) -> None:
    # The higher the number, the sooner.
    jobs = [_job(number) | {"queue_position": 1001 - number} for number in range(1, 1001)]

    def answer(route: Route) -> None:
        live = "state=queued" in route.request.url
        _answer(route, {"jobs": jobs if live else [], "next_before": None, "more": 0})

    with visit(chromium, origin(up)) as seen:
        page = seen.page
        page.route("**/api/jobs?*", answer)
        seen.sign_in(admin(up))
        rows = page.get_by_role("region", name="Waiting").get_by_role("listitem")
        expect(rows).to_have_count(50)
        expect(rows.nth(0)).to_contain_text("1000 run-1000queued1st in the queue")
        expect(rows.nth(21)).to_contain_text("979 run-979queued22nd in the queue")
        page.get_by_role("button", name="Show more (950)").click()
        expect(rows).to_have_count(150)
        page.evaluate("document.querySelectorAll('.jobs a')[120].focus()")
        before = page.evaluate(FOCUSED)
        _ask_now(page)
        page.wait_for_timeout(100)
        assert page.evaluate(FOCUSED) == before
        page.get_by_label("Search").fill("run-777")
        expect(rows).to_have_count(1)
        page.get_by_label("Search").fill("nobody has this")
        expect(page.get_by_text("No job matches the filter.")).to_be_visible()


def _cancel(page: Page) -> None:
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator(".head .chip")).to_have_text("cancelled")


def _ask_now(page: Page) -> None:
    with page.expect_response("**/api/nodes"):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def _rank(rank: int, busy_s: float) -> dict[str, Any]:
    return {
        "rank": rank, "device": f"n/{rank}", "at": "2026-01-01T00:00:00Z", "step": 5, "step_s": 0.034,
        "compute_s": busy_s, "data_s": 0.0, "waiting_s": 0.030 - busy_s, "communication_s": 0.004, "samples": 8,
        "planned_s": 0.010, "use": None,
    }  # fmt: skip


def _job(number: int) -> dict[str, Any]:
    return {
        "id": number, "name": f"run-{number}", "user": "ann", "state": "queued", "reason": "needs 8 x cpu, 2 free",
        "script": "train.py", "arguments": [], "devices": "8", "priority": 50, "preemptible": False,
        "max_time_s": None, "max_restarts": 0, "generation": 0, "allocation": [], "exit_code": None,
        "created_at": "2026-01-01T00:00:00Z", "started_at": None, "ended_at": None,
        "progress": {"step": 0, "epoch": 0, "samples_per_s": 0, "step_s": 0, "metrics": {}},
    }  # fmt: skip


def _answer(route: Route, content: Any) -> None:
    route.fulfill(json=content)
