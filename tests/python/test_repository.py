"""Files that no program of this package reads: issue forms, hooks, the one version."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import prefill

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form(path: Path) -> None:
    """What GitHub wants of a form: names, known kinds of fields, ids of their own."""
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["type"] in ("textarea", "input", "dropdown") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)


def test_reports_ask_for_info() -> None:
    for name in ("bug_report", "performance"):
        form = load(ROOT / f".github/ISSUE_TEMPLATE/{name}.yml")
        fields = {field["id"]: field for field in form["body"]}
        assert fields["info"]["attributes"]["label"] == "python -m prefill info --json"
        assert fields["info"]["validations"]["required"] is True


def test_hooks_are_what_ci_runs() -> None:
    """Each hook's program, and mypy's arguments."""
    [repository] = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    ci = (ROOT / ".ci/run").read_text()
    for hook in repository["hooks"]:
        program, *arguments = hook["entry"].split()
        assert f'bin/{program}" ' in ci, hook["id"]
        if program == "mypy":
            assert f'mypy" {" ".join(arguments)}' in ci


def test_version_is_written_once() -> None:
    """Other files read it from `_version.py`; the changelog has a section for it."""
    version = prefill.__version__
    files = ("*.py", "*.toml", "*.cmake", "*.txt")
    listed = subprocess.run(
        ["git", "grep", "-lF", f'"{version}"', "--", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode > 1:
        pytest.skip(f"no git checkout: {listed.stderr}")
    found = [name for name in listed.stdout.split() if not name.startswith("tests/")]
    assert found == ["python/prefill/_version.py"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", changes, re.MULTILINE)
