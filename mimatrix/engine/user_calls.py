"""The calls of a user's script in which ranks meet, as they are named if ranks make different ones.

Calls with the same key belong together. All that a rank does for a global batch has one key: one rank may still be in
`run.backward` while another one ends the batch in `optimizer.step`, or without data in the loader.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from mimatrix.comm.control.user_calls import Caller, UserCall

_STEP = "a global batch"
BACKWARD = UserCall("run.backward", key=_STEP)
OPTIMIZER_STEP = UserCall("optimizer.step", key=_STEP)
LOADER = UserCall("the loop over the loader", key=_STEP, verb="continued")
MODEL_IN_BATCH = UserCall("the model", key=_STEP, verb="ran")
MODEL_OUTSIDE = UserCall(
    "the model outside a batch",
    key="the model",
    verb="ran",
    fix="in stage 3 all ranks run the model together: run it on all ranks",
)
END_OF_LOOP = UserCall(
    "the loop over the loader",
    key="the end of a loop",
    verb="left",
    fix="leave the loop on all ranks after the same batch",
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def run_call(name: str) -> UserCall:
    """Return the call of a method that all ranks have to call, such as `run.evaluate`."""
    return UserCall(name, key=name, fix=f"call {name} on all ranks")


def save_call(step: int, place: str) -> UserCall:
    """Return the call of `run.save` at a step; saves of different steps do not belong together."""
    return UserCall(f"run.save at step {step}", f"run.save {step}", fix="call run.save on all ranks", place=place)


def as_user_call(call: UserCall) -> Callable[[MethodT], MethodT]:
    """Name a method that the user calls, of an object whose `_world` knows the user's thread."""

    def decorate(method: MethodT) -> MethodT:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            caller: Caller = self._world.caller
            outer = caller.enter(call)
            try:
                return method(self, *args, **kwargs)
            finally:
                caller.leave(outer)

        return cast("MethodT", run)

    return decorate


def with_user_call(caller: Caller, call: UserCall, function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs as a call of the user's."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        outer = caller.enter(call)
        try:
            return function(*args, **kwargs)
        finally:
            caller.leave(outer)

    return run


def iterate_as_user_call(caller: Caller, call: UserCall, iterator: Iterator[T]) -> Iterator[T]:
    """Yield from an iterator whose `next` is a call of the user's."""
    draw = with_user_call(caller, call, lambda: next(iterator, _END))
    try:
        while (item := draw()) is not _END:
            yield item
    finally:
        close: Callable[[], Any] = getattr(iterator, "close", lambda: None)
        close()


_END: Any = object()
