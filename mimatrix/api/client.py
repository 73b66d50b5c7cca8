"""A client of the job server's REST interface."""

import secrets
from functools import cached_property
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx

from mimatrix.api import models as m
from mimatrix.api.keepalive import KeepAliveConnection, is_direct
from mimatrix.core import environment
from mimatrix.core.errors import UserError, WorldError

T = TypeVar("T", bound=m.Message)
_TIMEOUT_S = 15.0
_TIMEOUT = httpx.Timeout(_TIMEOUT_S, connect=5.0)
_RETRYABLE = (408, 429)
_DETAILS = {
    401: "the job server does not know this token; set MIMATRIX_TOKEN to that of `mimatrix up`",
    403: "this token does not allow that; ask an admin for one with the role user",
    429: "too many wrong tokens came from this address; try again in a minute",
}
ADDRESS_FILE, TOKEN_FILE = "address", "token"


def data_folder() -> Path:
    """Return the default data directory of a server of this user."""
    return Path(environment.DATA.get() or Path.home() / ".local" / "share" / "mimatrix")


def find_server() -> tuple[str, str]:
    """Return address and token: from the environment, or as a server of this user stored them in its data directory."""
    address, token = environment.SERVER.get(), environment.TOKEN.get()
    stored = _read(data_folder() / ADDRESS_FILE)
    # The stored token is for the server of that directory only, and must not be sent to another.
    own = _read(data_folder() / TOKEN_FILE) if address in ("", stored) else ""
    return address or stored, token or own


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class Client:
    """A connection to one server, with one token."""

    def __init__(self, address: str, token: str) -> None:
        if not address:
            raise UserError("no job server is known; start one with `mimatrix up`, or set MIMATRIX_SERVER")
        self._address, self._is_direct = address, is_direct(address)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(base_url=address, headers=self._headers, timeout=_TIMEOUT)
        except (httpx.InvalidURL, ValueError) as error:
            raise UserError(
                f'"{address}" is not an address ({error}); write for example http://127.0.0.1:7700'
            ) from None

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()
        if "_connection" in self.__dict__:
            self._connection.close()

    def has_code_archive(self, digest: str) -> bool:
        """Return whether the server has a code archive already."""
        return self._request("HEAD", f"/api/code-archives/{digest}", refuses=(404,)).status_code == 200

    def upload(self, digest: str, archive: Path) -> None:
        """Upload a code archive."""
        with archive.open("rb") as data:
            self._request("PUT", f"/api/code-archives/{digest}", content=data)

    def submit(self, job: m.Submission) -> m.Job:
        """Submit a job. A lost answer is asked for again, with the same key, so that it stays one job."""
        keyed = job if job.key else job.model_copy(update={"key": secrets.token_hex(16)})
        try:
            return self._post(m.Job, "/api/jobs", keyed)
        except WorldError:
            return self._post(m.Job, "/api/jobs", keyed)

    def dry_run(self, job: m.Submission) -> m.DryRunResult:
        """Return what the scheduler would do with a job now."""
        return self._post(m.DryRunResult, "/api/jobs/dry-run", job)

    def jobs(self, before: int | None = None, limit: int = 50, states: tuple[str, ...] = (), user: str = "") -> m.Jobs:
        """Return a page of jobs, the newest first."""
        asked: dict[str, Any] = {"limit": limit, "state": list(states)}
        asked |= {"before": before} if before is not None else {}
        asked |= {"user": user} if user else {}
        return self._get(m.Jobs, "/api/jobs", asked)

    def job(self, number: int) -> m.Job:
        """Return a job."""
        return self._get(m.Job, f"/api/jobs/{number}")

    def events(self, number: int) -> list[m.Event]:
        """Return the events of a job, the oldest first."""
        return [m.Event.model_validate(each) for each in self._request("GET", f"/api/jobs/{number}/events").json()]

    def log(self, number: int, rank: int, offset: int, generation: int | None = None) -> m.Log:
        """Return the output of a rank, from an offset in bytes; a negative one counts from the end."""
        asked = {"rank": rank, "offset": offset} | ({} if generation is None else {"generation": generation})
        return self._get(m.Log, f"/api/jobs/{number}/log", asked)

    def ranks(self, number: int) -> m.Ranks:
        """Return the last reports of a job's ranks, and its stragglers."""
        return self._get(m.Ranks, f"/api/jobs/{number}/ranks")

    def history(self, number: int, points: int = 300) -> m.History:
        """Return the metrics of a job over time."""
        return self._get(m.History, f"/api/jobs/{number}/history", {"points": points})

    def checkpoints(self, number: int) -> list[m.Checkpoint]:
        """Return the checkpoints of a job, the newest first."""
        return [
            m.Checkpoint.model_validate(each) for each in self._request("GET", f"/api/jobs/{number}/checkpoints").json()
        ]

    def act(self, number: int, action: str) -> m.Job:
        """Perform `cancel` or `retry` on a job."""
        return m.Job.model_validate_json(self._request("POST", f"/api/jobs/{number}/{action}").content)

    def update(self, number: int, change: m.JobUpdate) -> m.Job:
        """Change a job's priority."""
        sent = self._request("PATCH", f"/api/jobs/{number}", json=change.model_dump(mode="json"))
        return m.Job.model_validate_json(sent.content)

    def nodes(self) -> list[m.Node]:
        """Return the nodes."""
        return [m.Node.model_validate(each) for each in self._request("GET", "/api/nodes").json()]

    def tokens(self) -> list[m.Token]:
        """Return the tokens of users."""
        return [m.Token.model_validate(each) for each in self._request("GET", "/api/tokens").json()]

    def create_token(self, wanted: m.TokenCreate) -> m.Token:
        """Create a token; only this answer has its secret."""
        return self._post(m.Token, "/api/tokens", wanted)

    def revoke_token(self, number: int) -> None:
        """Revoke a token."""
        self._request("DELETE", f"/api/tokens/{number}")

    def join(self, job: int, said: m.RendezvousRequest) -> m.Rendezvous:
        """Announce a worker."""
        return self._post(m.Rendezvous, f"/api/jobs/{job}/join", said)

    def report(self, job: int, said: m.Report) -> m.ReportReply:
        """Send a worker's report."""
        path, body = f"/api/jobs/{job}/report", said.model_dump_json(exclude_none=True)
        return m.ReportReply.model_validate_json(
            self._post_fast(path, body) if self._is_direct else self._post_text(path, body)
        )

    def store(self, job: int, what: str, said: m.Message) -> None:
        """Store the `profile`, `plan` or `checkpoints` of a job."""
        self._request("PUT", f"/api/jobs/{job}/{what}", json=said.model_dump(mode="json"))

    def _get(self, kind: type[T], path: str, asked: dict[str, Any] | None = None) -> T:
        return kind.model_validate_json(self._request("GET", path, params=asked).content)

    def _post(self, kind: type[T], path: str, said: m.Message) -> T:
        return kind.model_validate_json(self._request("POST", path, json=said.model_dump(mode="json")).content)

    @cached_property
    def _connection(self) -> KeepAliveConnection:
        return KeepAliveConnection(self._address, self._headers, _TIMEOUT_S, httpx.create_ssl_context)

    def _post_fast(self, path: str, body: str) -> bytes:
        """Send over the connection that is kept for frequent requests."""
        try:
            status, content = self._connection.post(path, body)
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from None
        if status >= 400:
            raise _error_of(status, content)
        return content

    def _post_text(self, path: str, body: str) -> bytes:
        return self._request("POST", path, content=body, headers={"Content-Type": "application/json"}).content

    def _request(self, method: str, path: str, refuses: tuple[int, ...] = (), **what: Any) -> httpx.Response:
        try:
            found = self._http.request(method, path, **what)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        if found.status_code >= 400 and found.status_code not in refuses:
            raise _error_of(found.status_code, found.content)
        return found

    def _unreachable(self, error: Exception) -> WorldError:
        said = str(error) or type(error).__name__
        return WorldError(
            f"the job server at {self._address} does not answer ({said}); is `mimatrix up` running there?"
        )


def _error_of(status: int, content: bytes) -> Exception:
    try:
        detail = m.Problem.model_validate_json(content).detail
    except ValueError:
        unknown = f"the job server answered {status}; is there another program at this address?"
        detail = _DETAILS.get(status, unknown)  # an answer to HEAD has no body
    return WorldError(detail) if status in _RETRYABLE or status >= 500 else UserError(detail)
