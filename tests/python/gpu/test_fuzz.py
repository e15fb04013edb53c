"""A short run of the fuzzer, 150 cases a backend; `tests/python/fuzz.py` makes long ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fuzz


@pytest.mark.timeout(300)
def test_no_case_fails(backend: str, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    options = ["--cases=150", "--seed=1", "--jobs=2", f"--backend={backend}", "--backend=auto"]
    failed = fuzz.main([*options, f"--json={summary}"])
    result = json.loads(summary.read_text())
    assert not failed, "\n".join(failure["smallest"] for failure in result["failures"])
    assert result["cases"] == 150
    assert result["ran_on"][backend] > 25
