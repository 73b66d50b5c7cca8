"""Docstrings, help texts, messages and guides use plain English and the field's terms.

Of a guide (`.md`) all is read but code; decisions and measurements are history and are not.
`python tests/test_prose.py [PATH ...]` prints what it finds in these files or folders, by file; without a path, in the
folders that must be clean. `--comments` also reads comments.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "engine",
    "comm",
    "hybrid",
    "worker",
    "profiler",
    "planner",
    "cli",
    "lab",
    "netsim",
    "collectives",
    "cluster",
    "core",
    "launch",
    "processes",
    "api",
    "scheduler",
    "monitor",
    "server",
)
"""Those that must be clean; others are only shown."""
FOLDERS = (*(f"mimatrix/{package}" for package in PACKAGES), "mimatrix/_init.py", "bench", "docs", "examples")
GUIDES = ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")
PHRASES = {
    r"whoever": "the one that, any rank that, the caller",
    r"nobody|no one": "no rank, no process, no peer, no user",
    r"some(?:body|one)": "a rank, a process, a peer, a user",
    r"any(?:body|one)": "any rank, any process, any peer",
    r"so (?:many|much)": "name the number: `count` ranks, this many",
    r"(?:for|after|takes?) so long": "for this time, after the timeout",
    r"go(?:es|ing)? on|went on|gone on": "continue, resume, keep training",
    r"(?<!there\s)(?:is|are|was|were) no (?!longer|more|less|fewer)\w+": "unknown, invalid, is not a ...",
    r"no number": "NaN, not finite",
    r"(?:r[au]ns? out|running out)(?! of memory)": "is exhausted, is empty; only memory is run out of",
    r"(?<!scikit-)learns?": "is trainable, trains, finds out",
    r"anew": "again, a new one, from scratch",
    r"beside": "next to, besides, in addition to",
    r"inside of": "inside, within",
    r"outside of": "outside",
    r"in good order": "cleanly, without an error",
    r"of all of it": "say what it is: a docstring is read alone",
    r"the same again": "say what it is: a docstring is read alone",
    r"once more": "again, a second time",
    r"(?:a|the) mistakes?": "an error, an invalid argument",
    r"gave way|gives? way": "fails, failed",
    r"under way": "in flight, in progress, pending",
    r"(?:leaves?|left) word": "posts, publishes, writes a message",
    r"of late": "recently",
    r"storeys?|doors": "layer, interface",
    r"ghosts?": "shadow step, idle rank",
}
"""What the old dialect said, as a regular expression of whole words, and what to say instead."""
_REGEX = re.compile(
    "|".join(rf"(?P<p{n}>\b(?:{phrase})\b)".replace(" ", r"\s+") for n, phrase in enumerate(PHRASES)), re.IGNORECASE
)
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A phrase of the dialect in a text that people read."""

    path: str
    line: int
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.phrase}"; say instead: {self.instead}'


def findings(path: str, source: str, *, comments: bool = False) -> list[Finding]:
    """Return every phrase of the dialect in docstrings and messages of a file, and in its comments if asked."""
    if path.endswith(".md"):
        texts = [(1, _FENCED.sub(lambda block: "\n" * block[0].count("\n"), source))]
    else:
        texts = [*_texts(ast.parse(source)), *(_comments(source) if comments else ())]
    return sorted({found for line, text in texts for found in _search(path, line, text)}, key=lambda found: found.line)


def _search(path: str, line: int, text: str) -> Iterator[Finding]:
    plain = re.sub(r"``.*?``|`[^`\n]*`", lambda code: "`" * len(code[0]), text)
    for match in _REGEX.finditer(plain):
        instead = PHRASES[list(PHRASES)[int(str(match.lastgroup)[1:])]]
        phrase = re.sub(r"\s+", " ", match[0])
        yield Finding(path, line + plain.count("\n", 0, match.start()), phrase, instead)


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield docstrings, and all other strings of several words: messages, reasons and help."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield from _sentence(node.lineno, "".join(map(str, parts)))
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _texts(part)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _sentence(node.lineno, node.value, is_docstring=isinstance(tree, ast.Expr))
        else:
            yield from _texts(node)


def _sentence(line: int, text: str, *, is_docstring: bool = False) -> Iterator[tuple[int, str]]:
    if is_docstring or len(text.split()) > 2:
        yield line, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def files_in(folder: Path) -> list[Path]:
    return [*sorted(folder.rglob("*.py")), *sorted(folder.glob("*.md"))] if folder.is_dir() else [folder]


@pytest.mark.parametrize("folder", [*FOLDERS, *GUIDES])
def test_prose_is_plain(folder: str) -> None:
    paths = files_in(ROOT / folder)
    assert paths
    found = [str(one) for path in paths for one in findings(str(path.relative_to(ROOT)), path.read_text("utf-8"))]
    assert found == [], f"{len(found)} findings:\n" + "\n".join(found)


SABOTAGE = [
    ('"""Nobody reads it."""', "Nobody"),
    ('class A:\n    """Tell whoever\n    comes."""', "whoever"),
    ('def f():\n    """Return x."""\n    raise UserError(f"{x!r} is no state; use y")', "is no state"),
    ('def f(x):\n    raise UserError(f"{x} has seen so many "\n        "ranks that it ended")', "so many"),
    ('logger.info("rank %d goes on without it", rank)', "goes on"),
    ('logger.warning(\n    "the loss of rank %d is "\n    "no number", 3)', "is no number"),
    ('X = typer.Option(help="Measure it anew, please.")', "anew"),
    ('REASON = {"x": "called inside of a batch"}', "inside of"),
    ('x: int = 3\n"""Of all of it."""', "Of all of it"),
    ('"""Pack it."""\n\ndef unpack():\n    """The same again."""', "The same again"),
    ('"""Parameters that learn\n\nand a device that runs\nout of memory."""', "learn"),
]


@pytest.mark.parametrize(("source", "phrase"), SABOTAGE)
def test_old_habits_are_seen(source: str, phrase: str) -> None:
    found = findings("x.py", source)
    assert phrase in [one.phrase for one in found]


def test_a_finding_names_the_line_and_a_replacement() -> None:
    (found,) = findings("a/b.py", 'import os\n\n"""Module.\n\nSomething goes\non here."""\n')
    assert str(found) == 'a/b.py:5: "goes on"; say instead: continue, resume, keep training'


def test_guides_are_read_without_their_code() -> None:
    text = "# Title\n\n```\nnobody goes on\n```\n\nCall `whoever`,\nwhich nobody does.\n"
    assert [(one.line, one.phrase) for one in findings("docs/x.md", text)] == [(8, "nobody")]


ALLOWED = [
    '"""Return the learning rate; there is no checkpoint, and the rank is no longer here."""',
    '"""Return `nobody` and what `whoever()` gives."""',
    'name = "nobody"\nkey = "is no"',
    "nobody = whoever = 3  # nobody reads comments here",
    '"""Continue besides that, within the batch; out of memory."""',
    '"""Ran out of memory; running\\nout of memory with scikit-learn, all of it."""',
]


@pytest.mark.parametrize("source", ALLOWED)
def test_plain_english_and_code_are_not_objected_to(source: str) -> None:
    assert findings("x.py", source) == []


def test_comments_are_read_if_asked() -> None:
    assert [one.phrase for one in findings("x.py", "x = 1  # nobody knows", comments=True)] == ["nobody"]


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--comments"]
    default = [ROOT / folder for folder in (*FOLDERS, *GUIDES)]
    total = 0
    for path in [file for folder in ([Path(word) for word in words] or default) for file in files_in(folder)]:
        found = findings(str(path), path.read_text("utf-8"), comments="--comments" in sys.argv)
        total += len(found)
        if found:
            sys.stdout.write("\n".join([f"{path}: {len(found)}", *(f"    {one}" for one in found)]) + "\n")
    sys.stdout.write(f"{total} findings\n")
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
