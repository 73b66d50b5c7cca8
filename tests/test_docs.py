"""The documents stay true: links lead somewhere, the README's Python runs, its tree and commands exist."""

import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

from mimatrix.cluster import Fabric, load_cluster
from mimatrix.collectives import Collective, FitOptions
from mimatrix.core import environment
from mimatrix.netsim import Costs, simulate

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts and "out" not in path.parts)
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_python_that_works_today_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    today = [block for block in blocks if "import mimatrix\n" not in block]
    assert today
    for block in today:
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "n2->hub" in done.stdout


def test_the_tree_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "mimatrix").glob("*/__init__.py")}
    named = set(re.findall(r"^  (\w+)/ ", README, re.MULTILINE))
    assert packages == named


def test_make_targets_that_are_mentioned_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make (\w+)`", page.read_text()):
            assert target in targets, f"{page.name} speaks of make {target}"


def test_the_page_of_the_command_is_what_the_command_says() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from generate import command_page

    assert (ROOT / "docs" / "command.md").read_text() == command_page(), "run `make docs`"


def registered_commands() -> list[str]:
    """Return the commands that `mimatrix --help` and the help of its groups list."""
    top = re.findall(r"^│ ([a-z][a-z-]+) ", mimatrix_help(), re.MULTILINE)
    groups = {"lab", "tokens"}
    inner = [
        f"{group} {name}"
        for group in groups
        for name in re.findall(r"^│ ([a-z]+) ", mimatrix_help(group), re.MULTILINE)
    ]
    return [*top, *inner]


def mimatrix_help(*words: str) -> str:
    plain = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "mimatrix.cli.main", *words, "--help"]
    return subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60, check=True).stdout


def test_every_command_is_on_the_page_of_the_command() -> None:
    described = re.findall(r"^## mimatrix (.+)$", (ROOT / "docs" / "command.md").read_text("utf-8"), re.MULTILINE)
    commands = registered_commands()
    assert len(commands) > 25
    assert set(commands) <= set(described)


@pytest.mark.parametrize(
    "name", ["jobs", "nodes", "plan", "profile", "simulate", "topology", "lab status", "tokens list"]
)
def test_commands_that_print_data_print_json_if_asked(name: str) -> None:
    assert "--json" in mimatrix_help(*name.split())


def test_no_help_loses_a_default_to_markup() -> None:
    """Rich takes brackets for markup, so a default that is written into a help text disappears."""
    assert "[default: (50)]" in mimatrix_help("submit")
    assert "[default: (~/.local/share/mimatrix)]" in mimatrix_help("up")


def test_metavars_are_upper_case() -> None:
    page = (ROOT / "docs" / "command.md").read_text("utf-8")
    usages = re.findall(r"^ *Usage: mimatrix [a-z -]+\[OPTIONS\](.*)$", page, re.MULTILINE)
    assert len(usages) > 20
    assert all(usage == usage.upper() and "--" not in usage for usage in usages), usages


def test_the_page_of_environment_variables_is_what_the_code_lists() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from generate import environment_page

    assert (ROOT / "docs" / "environment.md").read_text("utf-8") == environment_page(), "run `make docs`"


def test_the_reference_is_what_the_docstrings_say() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from generate import reference_page

    assert (ROOT / "docs" / "reference.md").read_text("utf-8") == reference_page(), "run `make docs`"


def test_variables_that_pages_mention_exist() -> None:
    names = {variable.name for variable in environment.variables()} | {"MIMATRIX_CASES"}
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            missing = set(re.findall(r"\bMIMATRIX_[A-Z_]*[A-Z]\b", page.read_text())) - names
            assert not missing, f"{page.name} mentions {', '.join(sorted(missing))}"


def test_the_example_of_a_cluster_can_be_simulated(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)
    (tmp_path / "example.toml").write_text(block)
    fabric = Fabric(load_cluster(str(tmp_path / "example.toml")))
    found, _ = simulate("gdraa", fabric, Collective.ALL_REDUCE, 1 << 20, FitOptions(), Costs())
    assert found.ranks == 4


def glossary_objections(page: str, names: Collection[str]) -> list[str]:
    """Return a sentence for every term that is explained twice, and for every name that is not in the code."""
    rows = re.findall(r"^\| (.+?) \|", page, re.MULTILINE)[1:]
    terms = Counter(term.strip(" `").lower() for row in rows for term in row.split(","))
    said = [f'"{term}" is explained {count} times' for term, count in terms.items() if count > 1]
    code = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", page)
    # A term of several words, or with a capital inside, is meant as a name even without backticks.
    code += [
        word for row in rows for word in re.findall(r"(?<![`\w.])(?:\w+_\w+|[A-Z][a-z0-9]+[A-Z]\w*)(?![`\w])", row)
    ]
    missing = sorted({name for name in code if not set(name.removesuffix(".py").split(".")) <= set(names)})
    return [*said, *(f"`{name}` is not in the code" for name in missing)]


@cache
def names_in_code() -> frozenset[str]:
    """Return every name in the code, and those of modules and commands; comments and strings do not count."""
    paths = [*(ROOT / "mimatrix").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    tokens = (
        token for path in paths for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    )
    modules = {part for path in paths for part in path.relative_to(ROOT).with_suffix("").parts}
    return frozenset({token.string for token in tokens if token.type == tokenize.NAME} | modules)


def test_the_glossary_explains_a_term_once_and_names_code_that_exists() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    assert page.count("\n| ") > 5
    assert glossary_objections(page, names_in_code()) == []


def test_sabotage_of_the_glossary_is_seen() -> None:
    page = "| word | means |\n|---|---|\n| rank | a process; `run.rank` |\n| global batch, step | `Run.step` |\n"
    names = {"run", "Run", "rank", "step", "train_loop"}
    assert glossary_objections(page, names) == []
    assert glossary_objections(page + "| Rank | again |\n", names) == ['"rank" is explained 2 times']
    assert glossary_objections(page + "| part, Step | again |\n", names) == ['"step" is explained 2 times']
    assert glossary_objections(page + "| part | see `run.cycle` |\n", names) == ["`run.cycle` is not in the code"]
    assert glossary_objections(page + "| TrainLoop | it |\n", names) == ["`TrainLoop` is not in the code"]
    assert glossary_objections(page + "| train_loop | it |\n", names) == []
