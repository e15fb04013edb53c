"""The large sizes made small, on the reference: checks run, and see a wrong last row or head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import big
from big import CASES, CPU, CUDA, figures
from prefill import ops
from prefill.reference import reference_attention


def test_a_whole_run(tmp_path: Path) -> None:
    summary = tmp_path / "big.json"
    assert big.main(["--device=cpu", f"--json={summary}"]) == 0
    rows = {row["case"]: row for row in json.loads(summary.read_text())["cases"]}
    assert list(rows) == list(CASES)
    assert all(row["figures"] and not row["wrong"] for row in rows.values())


def test_sizes_pass_32_bits() -> None:
    assert CUDA.far > 1 << 32
    assert CUDA.far // 2 > 1 << 31
    assert CUDA.masked**2 > 1 << 32
    assert CUDA.grid > 1 << 16
    assert all(getattr(CUDA, name) > getattr(CPU, name) for name in vars(CPU))


@pytest.mark.parametrize("case", [name for name in CASES if name != "too_long"])
def test_a_wrong_last_head_of_the_last_row_is_seen(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(request: Any) -> Any:
        out, lse = reference_attention(request)
        out[-1, -1] += 0.05
        return out, lse

    monkeypatch.setattr(ops, "reference_attention", faulty)
    assert "too large" in figures(CASES[case], "reference", "cpu")[1]


def test_a_refusal_that_is_missing_is_seen() -> None:
    assert "too large" in figures(CASES["too_long"], "fa3", "cpu")[1]  # needs a GPU, it says


def test_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(request: Any) -> Any:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(ops, "reference_attention", faulty)
    compared, wrong = figures(CASES["grids"], "reference", "cpu")
    assert wrong == "RuntimeError: CUDA error: invalid argument"
    assert compared == 0
