"""Plans and profiles as workers send them: decoded once when they come in, so that later readers can trust them."""

import json
from typing import Any

from mimatrix.core.errors import UserError
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Measurements
from mimatrix.server.errors import ApiError

_SHORTEST_S = 1e-9
"""A rank that is busy at all is busy for longer than this, so that a rate computed from it is finite."""


def checked_plan(content: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's plan as the planner writes it, and the reason for its last change.

    Raises:
        ApiError: It is not a plan, or one that cannot be computed with.
    """
    try:
        plan = Plan.from_json(content)
    except (ValueError, TypeError, UserError) as error:
        raise ApiError(422, f"this is not a plan ({error}); send what the planner made") from None
    if any(0 < part.busy_s < _SHORTEST_S for part in plan.parts):
        raise ApiError(422, f"ranks.busy_s is 0 or at least {_SHORTEST_S:g} s; send what the planner made")
    why = content.get("why")
    return {**plan.to_json(), "why": why if isinstance(why, str) else ""}


def checked_profile(content: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's profile as the profiler writes it.

    Raises:
        ApiError: It is not a profile, or one that cannot be computed with.
    """
    try:
        measurements = Measurements.from_text(json.dumps(content))
    except (ValueError, TypeError, UserError) as error:
        raise ApiError(422, f"this is not a profile ({error}); send what the profiler made") from None
    stored: dict[str, Any] = json.loads(measurements.to_text())
    return stored
