"""The public surface: what `mimatrix` exports, what a `Run` offers, and whether arguments are documented."""

import inspect
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mimatrix

ROOT = Path(__file__).parent.parent
EXPORTED = [
    "ConfigError",
    "DifferentCalls",
    "Hybrid",
    "MiMatrixError",
    "MicroBatchLoader",
    "MismatchError",
    "PeerLost",
    "Plan",
    "Preempted",
    "PreparedOptimizer",
    "Run",
    "RunStatus",
    "SaveError",
    "ScheduleError",
    "StepStats",
    "SyncedLRScheduler",
    "UnsuitedError",
    "UserError",
    "WeightAverage",
    "WorldError",
    "__version__",
    "init",
]
RUN = [
    "backward",
    "checkpoints",
    "close",
    "device",
    "devices",
    "ema",
    "enable_preemption",
    "epochs",
    "evaluate",
    "flush_log",
    "full_state_dict",
    "grad_norm",
    "history",
    "history_from",
    "in_batch",
    "load",
    "log",
    "measurements",
    "mode_choice",
    "plan",
    "plan_changes",
    "position",
    "prepare",
    "prepare_scheduler",
    "rank",
    "register_user_state",
    "save",
    "settings",
    "shares",
    "split",
    "stage",
    "stats",
    "status",
    "step",
    "swa",
    "transports",
    "user_state",
    "world_size",
]
FROZEN = ("global_batch", "batch", "stage", "plan", "mode", "seed")
"""Arguments of `init` that the README shows."""


def undocumented(function: Callable[..., Any]) -> list[str]:
    """Return the parameters that the `Args:` section of a function misses, and names in it that are not parameters."""
    parameters = {name for name in inspect.signature(function).parameters if name != "self"}
    documented = set(documented_arguments(inspect.getdoc(function) or ""))
    return sorted(parameters ^ documented)


def documented_arguments(docstring: str) -> list[str]:
    """Return the names in the `Args:` section of a docstring that have a description."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    return re.findall(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?: +\S", section[1], re.MULTILINE) if section else []


def public_names(value: object) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


def test_what_mimatrix_exports() -> None:
    assert mimatrix.__all__ == EXPORTED
    assert mimatrix.__all__ == sorted(mimatrix.__all__)
    assert public_names(mimatrix) == [name for name in EXPORTED if not name.startswith("_")]


def test_a_fresh_python_lists_the_names_before_it_has_imported_torch() -> None:
    code = "import sys, mimatrix; print(*dir(mimatrix)); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(EXPORTED) <= set(done.stdout.split())


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    value = getattr(mimatrix, name)
    assert value is not None
    if name != "__version__":
        assert inspect.getdoc(value), f"mimatrix.{name} has no docstring"


def test_every_error_is_exported() -> None:
    from mimatrix.core import errors

    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined <= set(EXPORTED)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mimatrix' has no attribute 'innit'"):
        _ = mimatrix.innit


def test_what_a_run_offers() -> None:
    run = mimatrix.init(global_batch=2, plan=None, quiet=True)
    try:
        assert public_names(run) == RUN
    finally:
        run.close()


@pytest.mark.parametrize("name", RUN)
def test_everything_public_of_a_run_has_a_docstring(name: str) -> None:
    member = inspect.getattr_static(mimatrix.Run, name)
    assert isinstance(member, property | types.FunctionType), f"Run.{name} is a plain attribute"
    assert inspect.getdoc(member), f"Run.{name} has no docstring"


def test_every_argument_of_init_is_documented() -> None:
    assert set(FROZEN) <= set(inspect.signature(mimatrix.init).parameters)
    assert undocumented(mimatrix.init) == []


def test_every_argument_of_prepare_is_documented() -> None:
    assert undocumented(mimatrix.Run.prepare) == []
    assert "Returns:" in (inspect.getdoc(mimatrix.Run.prepare) or "")


@pytest.mark.parametrize("name", ["num_workers", "pin_memory", "collate_fn", "prefetch_factor", "drop_last", "shuffle"])
def test_prepare_documents_the_names_of_a_dataloader(name: str) -> None:
    assert f"`{name}`" in (inspect.getdoc(mimatrix.Run.prepare) or "")


def test_missing_and_invented_arguments_are_seen() -> None:
    def described(first: int, second: int, **more: Any) -> None:  # noqa: D417
        """Do something.

        Args:
            first (int): The first one, with a description
                of two lines: this one.
            third: Which does not exist.
            **more: The others.

        Returns:
            second: Not an argument.
        """

    def undescribed(first: int) -> None:
        """Do something with `first`."""

    def empty(first: int) -> None:  # noqa: D417
        """Do something.

        Args:
            first:
        """

    assert undocumented(described) == ["second", "third"]
    assert undocumented(undescribed) == ["first"]
    assert undocumented(empty) == ["first"]
