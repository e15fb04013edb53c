"""The Python code of the README and of docs/ runs, on the CPU.

The blocks of a page run one after another in one namespace, as a reader would paste them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_flashinfer import fake_flashinfer
from prefill.__main__ import make_parser

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    str(path.relative_to(ROOT)): blocks
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (blocks := list(BLOCK.finditer(path.read_text())))
}
OPTIONAL = {"docs/diffusers.md": "diffusers", "docs/transformers.md": "transformers"}


@pytest.mark.parametrize("page", PAGES)
def test_code(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "docs/flashinfer.md":
        fake_flashinfer(monkeypatch)
    if page in OPTIONAL:
        pytest.importorskip(OPTIONAL[page])
    text = (ROOT / page).read_text()
    namespace: dict[str, object] = {"__name__": page}
    for block in PAGES[page]:
        # Empty lines keep the numbers of the lines: a traceback points into the page.
        code = "\n" * text[: block.start(1)].count("\n") + block[1]
        exec(compile(code.replace('"cuda"', '"cpu"'), page, "exec"), namespace)


def test_pages_with_code_are_found() -> None:
    known = {"README.md", "docs/flashinfer.md", "docs/fp8.md", "docs/masks.md", *OPTIONAL}
    assert known <= set(PAGES)


def test_links() -> None:
    """What a page links to in this repository is there."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def commands() -> Iterator[tuple[str, str]]:
    """Each `python -m prefill ...` with its page: lines of blocks, and backquotes in the text."""
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob(".github/*/*.yml")):
        text = path.read_text()
        found = re.findall(r"^(?: *label: )?(python -m prefill\b.*)$", text, re.MULTILINE)
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        found += (" ".join(span.split()) for span in re.findall(r"`(python -m[^`]+)`", prose))
        yield from ((path.name, command) for command in found if "..." not in command)


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line has against a command; it runs nothing."""
    words = shlex.split(command, comments=True)
    assert words[:3] == ["python", "-m", "prefill"]
    try:
        make_parser().parse_args(words[3:])
    except SystemExit as stopped:
        said = capsys.readouterr().err
        return said if stopped.code else ""  # `--version` ends it too
    return ""


def test_commands_are_taken_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    told = set(commands())
    assert {"README.md", "getting_started.md", "performance.md"} <= {page for page, _ in told}
    assert [each for each in told if refusal(each[1], capsys)] == []


def sources() -> str:
    """The texts of the package and of its build, adjacent string literals joined."""
    paths = [*(ROOT / "python/prefill").glob("*.py"), ROOT / "cmake/prefill_build.py"]
    joined = re.sub(r"""["']\s*\n\s*f?["']""", "", "\n".join(path.read_text() for path in paths))
    return " ".join(joined.split())


def test_troubleshooting_quotes_real_texts() -> None:
    """What stands in backquotes and then a colon, first in a line of its list, is a message."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^- (?:\*\*)?`([^`]+)`(?:\*\*)?:", text, re.MULTILINE)
    assert len(quoted) > 15
    there = sources()
    assert not [message for message in quoted if message not in there]
