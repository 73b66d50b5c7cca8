"""The application: routes and middleware."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from mimatrix import __version__
from mimatrix.api.models import Problem
from mimatrix.server import errors
from mimatrix.server.context import Context
from mimatrix.server.controller.reconcile import Controller
from mimatrix.server.routes import audit, devices, health, jobs, metrics, nodes, tokens, workers
from mimatrix.server.web import api_docs, static
from mimatrix.server.web.audit import Audit
from mimatrix.server.web.authentication import AuthenticateFirst
from mimatrix.server.web.limits import BodyLimits
from mimatrix.server.web.report_fast_path import ReportFastPath

_ROUTERS = (jobs, metrics, workers, nodes, devices, tokens, audit, health)
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {"application/problem+json": {"schema": Problem.model_json_schema()}},
    }
    for status in (400, 401, 403, 404, 408, 409, 413, 422, 429, 503)
}


def create_app(context: Context, controller: Controller) -> FastAPI:
    """Create the application of one server."""
    app = FastAPI(
        title="MiMatrix job server",
        version=__version__,
        summary="Training jobs on heterogeneous clusters.",
        # Those of FastAPI fetch scripts from elsewhere, and stay blank without internet access.
        docs_url=None,
        redoc_url=None,
        responses=_REFUSALS,
    )
    app.state.context, app.state.controller = context, controller
    errors.install(app)
    api_docs.install(app)
    static.install(app)
    for module in _ROUTERS:
        app.include_router(module.router)
    # From the innermost to the outermost: authentication comes first, before any body is read.
    app.add_middleware(Audit, context=context)
    app.add_middleware(ReportFastPath, context=context)
    app.add_middleware(BodyLimits)
    app.add_middleware(AuthenticateFirst, authenticator=context.authenticator)
    return app
