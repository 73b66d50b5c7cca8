"""The OpenAPI description against the server, by schemathesis: nothing breaks it, and it answers as it says."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from support.servers import AppServer, app_server
from test_api import ARCHIVE, DIGEST, JOB, worker

CASES = int(os.environ.get("MIMATRIX_CASES", "3"))
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("who", ["ann", "ben", "dee", "worker"])
def test_no_5xx_and_no_breach_of_the_schema(tmp_path: Path, who: str) -> None:
    with app_server(tmp_path) as there:
        there.ask("ben", "PUT", f"/api/code-archives/{DIGEST}", content=ARCHIVE)
        for _ in range(3):
            worker(there, there.ask("ben", "POST", "/api/jobs", json=JOB).json()["id"])
        there.secrets["worker"] = there.secrets["worker-1"]
        schema = schemathesis.openapi.from_asgi("/openapi.json", there.http.app)
        tried = [_try(found.ok(), there, who) for found in schema.get_all_operations()]  # type: ignore[union-attr]
        paths = there.http.get("/openapi.json").json()["paths"]
        every = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
        assert sorted(tried) == sorted(every)


def _try(operation: Any, there: AppServer, who: str) -> str:
    for mode in schemathesis.GenerationMode:

        @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy(generation_mode=mode))
        def one(case: schemathesis.Case[Any]) -> None:
            there.context.authenticator._failures.clear()
            there.context.controller_turned_at_s = there.context.monotonic()  # no thread calls the controller here
            answer = case.call(headers=there.headers(who))
            case.validate_response(answer, checks=CHECKS)

        # What takes nothing cannot be given anything wrong.
        with suppress(Unsatisfiable):
            one()
    return str(operation.label)
