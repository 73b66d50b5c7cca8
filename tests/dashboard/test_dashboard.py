"""The dashboard as people use it: a real server with real jobs, in a real browser."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsers import DESK, PHONE, browser, needs_browser, visit
from houses import Server, server
from playwright.sync_api import Browser, Route, expect

from mimatrix.wire.messages import ACTIVE, ENDED, JobState, Role, TokenWanted

pytestmark = [needs_browser, pytest.mark.timeout(120)]
LONG = "import time\nprint(open('note.txt').read(), flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("dashboard") / "data", devices=2) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


def origin(up: Server) -> str:
    return f"http://127.0.0.1:{up.port}"


def admin(up: Server) -> str:
    return (up.data / "token").read_text().strip()


def token(up: Server, user: str, role: Role) -> str:
    with up.client() as client:
        return client.make_token(TokenWanted(user=user, role=role)).secret


@contextmanager
def running(up: Server, script: str, *words: str) -> Iterator[int]:
    """A job that has devices, and is gone afterwards."""
    number = up.submit(script, *words)
    try:
        up.until(number, lambda job: job.state in ACTIVE)
        yield number
    finally:
        with up.client() as client:
            client.act(number, "cancel")
        up.until(number, lambda job: job.state in ENDED)


def test_signing_in_and_out(up: Server, chromium: Browser) -> None:
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


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_job_is_handed_in_waits_with_a_reason_moves_and_is_cancelled(
    up: Server, chromium: Browser, tmp_path: Path, size: tuple[int, int]
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
            page.get_by_role("button", name="What would happen?").click()
            expect(page.get_by_text("It would ")).to_be_visible()
            assert not seen.is_wider_than_the_screen()
            page.get_by_role("button", name="Submit", exact=True).click()
            page.wait_for_url(re.compile(r"#/jobs/\d+$"))
            return int(page.url.rpartition("/")[2])

        first = hand_in("first")
        expect(page.get_by_role("region", name="Output", exact=True).last).to_contain_text("carried along in äöü")
        second = hand_in("second")
        expect(page.locator(".why")).to_contain_text("Why it waits: Needs 2 x cpu")
        page.get_by_role("button", name="Priority").click()
        page.get_by_label("From 0 to 100").fill("77")
        page.get_by_role("button", name="Change").click()
        expect(page.get_by_text(f"Job {second} has priority 77.")).to_be_visible()
        assert not seen.is_wider_than_the_screen()

        page.get_by_role("link", name="All jobs").click()
        waiting = page.get_by_role("region", name="Waiting").get_by_role("listitem")
        expect(waiting).to_contain_text("priority 77")
        expect(waiting).to_contain_text("needs 2 x cpu")
        assert not seen.is_wider_than_the_screen()
        for number in (second, first):
            seen.go(f"#/jobs/{number}")
            page.get_by_role("button", name="Cancel", exact=True).click()
            page.get_by_role("button", name="Cancel the job").click()
            expect(page.locator(".head .chip")).to_have_text("cancelled")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
    assert up.until(first, lambda job: job.state in ENDED).state is JobState.CANCELLED


@pytest.mark.long
def test_a_job_that_trains_shows_curves_ranks_and_where_a_step_goes(up: Server, chromium: Browser) -> None:
    with (
        running(up, "training.py", "--devices", "2", "--", "3000", "0.02") as number,
        visit(chromium, origin(up)) as seen,
    ):
        up.until(number, lambda job: job.progress.step > 0)
        seen.sign_in(admin(up))
        seen.go(f"#/jobs/{number}")
        page = seen.page
        expect(page.get_by_role("img", name=re.compile("^loss: from"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("^Samples.s: from"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile(r"^Rank 1: .*computing \d+ %, communicating"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile(r"^Rank 1: .*computing [\d.]+ ms"))).to_be_visible()
        step = page.locator(".figures dd").first
        expect(step).not_to_have_text(step.inner_text())
        page.get_by_text("Time", exact=True).click()
        expect(page.get_by_role("img", name=re.compile("^loss: from"))).to_be_visible()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert seen.barriers() == []
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert not seen.is_wider_than_the_screen()


@pytest.mark.long
def test_everybody_can_use_every_view(up: Server, chromium: Browser) -> None:
    with visit(chromium, origin(up)) as seen:
        page = seen.page
        seen.go("")
        page.get_by_label("Token").wait_for()
        assert seen.barriers() == []
        seen.sign_in(admin(up))
        node = page.evaluate(
            "fetch('api/nodes', {headers: {Authorization: 'Bearer ' + sessionStorage['mimatrix-token']}})"
            ".then(answer => answer.json()).then(nodes => nodes[0].name)"
        )
        for route, ready in (
            ("#/", ".meter"),
            ("#/cluster", ".device"),
            (f"#/cluster/{node}/0", ".lists > p"),
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
        page.get_by_role("heading", name="That did not work").wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"


def test_who_only_looks_is_offered_nothing_else(up: Server, chromium: Browser) -> None:
    with running(up, "patient.py", "--", "300") as number, visit(chromium, origin(up)) as seen:
        seen.sign_in(token(up, "vera", Role.VIEWER))
        expect(seen.page.get_by_role("link", name="Submit")).to_have_count(0)
        seen.go(f"#/jobs/{number}")
        expect(seen.page.locator(".head .chip")).to_be_visible()
        expect(seen.page.get_by_role("button", name="Cancel")).to_have_count(0)
        seen.go("#/submit")
        expect(seen.page.get_by_text("A viewer looks and hands nothing in")).to_be_visible()


@pytest.mark.long
def test_a_slow_rank_is_said_in_words_and_a_server_that_is_away_is_waited_for(up: Server, chromium: Browser) -> None:
    ranks = [_rank(rank, busy) for rank, busy in enumerate((0.010, 0.030, 0.011))]
    said = "rank 1 on n/1 computes 3.0 times as long as planned; the others lose 20 ms in every step"
    trouble = {"kind": "slow", "rank": 1, "seat": "n/1", "cause": "compute", "lost_s": 0.02, "sentence": said}
    with running(up, "patient.py", "--", "300") as number, visit(chromium, origin(up)) as seen:
        page = seen.page
        page.route("**/api/jobs/*/ranks", lambda route: _answer(route, {"ranks": ranks, "troubles": [trouble]}))
        seen.sign_in(admin(up))
        seen.go(f"#/jobs/{number}")
        expect(page.get_by_role("alert").filter(has_text="One rank is slow.")).to_contain_text("R" + said[1:])
        expect(page.locator("li.slow")).to_contain_text("slow: compute")
        expect(page.get_by_text("Rank 1 is busy longest, 30.0 ms")).to_be_visible()
        assert seen.barriers() == []
        page.context.set_offline(True)
        expect(page.get_by_text("The server does not answer.")).to_be_visible()
        page.context.set_offline(False)
        page.get_by_role("button", name="Try now").click()
        expect(page.get_by_text("The server does not answer.")).to_be_hidden()


@pytest.mark.long
def test_a_thousand_jobs_stay_where_they_are(up: Server, chromium: Browser) -> None:
    jobs = [_job(number) for number in range(1000, 0, -1)]

    def answer(route: Route) -> None:
        live = "state=queued" in route.request.url
        _answer(route, {"jobs": jobs if live else [], "next_before": None, "more": 0})

    with visit(chromium, origin(up)) as seen:
        page = seen.page
        page.route("**/api/jobs?*", answer)
        seen.sign_in(admin(up))
        rows = page.get_by_role("region", name="Waiting").get_by_role("listitem")
        expect(rows).to_have_count(50)
        page.get_by_role("button", name="Show more (950)").click()
        expect(rows).to_have_count(150)
        page.evaluate("document.querySelectorAll('.jobs a')[120].focus()")
        place = "[document.activeElement.getBoundingClientRect().top, document.activeElement.href]"
        before = page.evaluate(place)
        with page.expect_response("**/api/nodes"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_timeout(100)
        assert page.evaluate(place) == before
        page.get_by_label("Search").fill("run-777")
        expect(rows).to_have_count(1)
        page.get_by_label("Search").fill("nobody has this")
        expect(page.get_by_text("No job fits this.")).to_be_visible()


def _rank(rank: int, busy_s: float) -> dict[str, Any]:
    return {
        "rank": rank, "seat": f"n/{rank}", "at": "2026-01-01T00:00:00Z", "step": 5, "step_s": 0.034,
        "compute_s": busy_s, "data_s": 0.0, "waiting_s": 0.030 - busy_s, "communication_s": 0.004, "samples": 8,
        "planned_s": 0.010, "use": None,
    }  # fmt: skip


def _job(number: int) -> dict[str, Any]:
    return {
        "id": number, "name": f"run-{number}", "user": "ann", "state": "queued", "reason": "needs 8 x cpu, 2 free",
        "script": "train.py", "arguments": [], "devices": "8", "priority": 50, "preemptible": False,
        "max_time_s": None, "retries": 0, "generation": 0, "seats": [], "exit_code": None,
        "created_at": "2026-01-01T00:00:00Z", "started_at": None, "ended_at": None,
        "progress": {"step": 0, "epoch": 0, "samples_per_s": 0, "step_s": 0, "metrics": {}},
    }  # fmt: skip


def _answer(route: Route, content: Any) -> None:
    route.fulfill(json=content)
