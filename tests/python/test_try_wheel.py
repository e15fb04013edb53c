"""scripts/try_wheel.py: what it makes of what the commands in an environment answer."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INFO = {"versions": {"python": "3.12.1", "torch": "2.11.0"}, "build": {"kernels": [{}] * 16}}
Answer = tuple[bool, str]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_wheel", ROOT / "scripts/try_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "try_wheel", module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def answers(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """By a word of the command; all is well unless a test changes it."""
    said = {
        "venv": (True, ""),
        "install": (True, ""),
        "info": (True, json.dumps(INFO)),
        "check": (True, "all that was checked is right"),
        "-c": (True, ""),
    }

    def run(*command: Any, seconds: int, cwd: Path) -> Answer:
        words = [str(part) for part in command]
        assert cwd != ROOT
        return next(answer for word, answer in said.items() if word in words)

    monkeypatch.setattr(script, "run", run)
    return said


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    path = tmp_path / "prefill-0.1.0-py3-none-any.whl"
    path.touch()
    return str(path)


@pytest.fixture
def tried(script: ModuleType, wheel: str, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    """Exit status and trials of a run with one interpreter and these torches."""

    def try_it(*torches: str) -> tuple[int, Any]:
        outcome = tmp_path / "outcome.json"
        status = script.main([wheel, "--torch", *torches, "--json", str(outcome)])
        return status, json.loads(outcome.read_text())["trials"]

    return try_it


@pytest.mark.usefixtures("answers")
def test_all_right(tried: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    status, trials = tried("2.11.0", "newest")
    assert status == 0
    assert [trial["verdict"] for trial in trials] == ["ok", "ok"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| python | torch | kernels | check | call | verdict |"
    assert lines[2:] == ["| 3.12.1 | 2.11.0 | 16 | right | right | ok |"] * 2


@pytest.mark.parametrize(
    ("command", "answer", "verdict"),
    [
        (
            "info",
            (False, "Traceback\nImportError: no torch\n"),
            "WRONG: info: ImportError: no torch",
        ),
        ("info", (True, "not JSON"), "WRONG: info: not JSON"),
        (
            "info",
            (True, json.dumps(INFO | {"build": None, "missing": "too old a torch"})),
            "WRONG: too old a torch",
        ),
        ("check", (False, "SOMETHING IS WRONG\n"), "WRONG: check: SOMETHING IS WRONG"),
        ("-c", (False, "AssertionError: differs\n\n"), "WRONG: call: AssertionError: differs"),
    ],
)
def test_something_wrong(
    answers: dict[str, Answer],
    tried: Callable[..., Any],
    command: str,
    answer: Answer,
    verdict: str,
) -> None:
    answers[command] = answer
    status, trials = tried("2.10.0")
    assert status == 1
    assert trials[0]["verdict"] == verdict


@pytest.mark.parametrize("command", ["venv", "install"])
def test_nothing_that_installs(
    answers: dict[str, Answer], tried: Callable[..., Any], command: str
) -> None:
    answers[command] = (False, "ERROR: no such version")
    status, trials = tried("9.9")
    assert status == 1
    assert trials[0]["verdict"] == "not installed: ERROR: no such version"


def test_the_call_is_right_here(script: ModuleType) -> None:
    """The program itself, with the package that is under test."""
    namespace: dict[str, object] = {}
    exec(script.CALL, namespace)
    assert float(str(namespace["error"])) > 0.0


def test_commands_do_not_see_the_source_tree(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told = "import os; print(os.getcwd(), os.environ.get('PYTHONPATH'))"
    good, said = script.run(sys.executable, "-c", told, seconds=60, cwd=tmp_path)
    assert good
    assert said == f"{tmp_path} None\n"
    assert script.run(tmp_path / "no python", seconds=60, cwd=tmp_path)[0] is False
