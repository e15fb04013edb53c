"""docs/reliability.md: what it names exists, and its table is made of summaries."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

import big
import fuzz
import reliability_table
import soak
from reliability_table import (
    ON_GPU,
    PAGE,
    SANITIZER_RUNS,
    WITHOUT_GPU,
    held,
    main,
    marks,
    replaced,
    tables,
)
from sanitizer_log import summary_of

ROOT = PAGE.parents[1]


def test_what_the_page_names_exists() -> None:
    """Files, and the tests in them."""
    text = PAGE.read_text()
    names = re.findall(r"`((?:tests|scripts|csrc|python)/[\w./]+)`", text)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []
    tests = "".join(path.read_text() for path in ROOT.glob("tests/python/**/test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_the_page_has_the_marks_once() -> None:
    text = PAGE.read_text()
    for name in (ON_GPU, WITHOUT_GPU):
        assert [text.count(mark) for mark in marks(name)] == [1, 1]
        assert held(text, name)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "page.md"
    both = [begin + "old\n" + end for begin, end in map(marks, (ON_GPU, WITHOUT_GPU))]
    path.write_text("before\n" + "between\n".join(both) + "after\n")
    monkeypatch.setattr(reliability_table, "PAGE", path)
    return path


def test_a_table_of_real_summaries(
    tmp_path: Path,
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Made of what the programs write, so that neither changes alone."""
    few = {"causal": soak.CASES["causal"]}
    monkeypatch.setattr(soak, "CASES", few)
    options = ["--device=cpu", "--repeats=2", "--seconds=0.1"]
    apart = (("soak-a", ["repeats", "second_gpu"]), ("soak-b", ["repeats"]))
    for name, checks in apart:
        given = [f"--json={tmp_path}/{name}.json", *(f"--check={check}" for check in checks)]
        assert soak.main([*options, *given]) == 0
    options = ["--device=cpu", f"--json={tmp_path}/big-reference.json"]
    assert big.main([*options, "--case=grids", "--case=too_long"]) == 0
    args = ["--device=cpu", "--cases=4", "--backend=reference", f"--json={tmp_path}/fuzz.json"]
    assert fuzz.main(args) == 0
    capsys.readouterr()

    assert main([str(tmp_path), "abc"]) == 0
    text = page.read_text()
    content = held(text, WITHOUT_GPU)
    assert (
        text
        == "before\n"
        + "between\n".join(
            begin + inside + end
            for inside, (begin, end) in zip(
                ("old\n", content), map(marks, (ON_GPU, WITHOUT_GPU)), strict=True
            )
        )
        + "after\n"
    )
    assert capsys.readouterr().out == f"old\n\n{content}"
    lines = content.splitlines()
    assert re.fullmatch(r"cpu, torch \S+, commit abc:", lines[0])
    assert re.fullmatch(
        r"\| fuzzing \| 4 cases of seed 0: \d on reference; \d refused, \d malformed ones rejected "
        r"\| \d+ s \| none \|",
        lines[4],
    )
    assert re.match(r"\| large sizes \| 2 cases on reference, [1-9]\d* figures \|", lines[5])
    assert re.fullmatch(
        r"\| soak: repeats \| 4 results compared on reference \| \d+ s \| none \|", lines[6]
    )
    assert lines[7:] == ["| soak: second gpu | skipped: no second GPU | 0 s | none |"]


def sanitized(folder: Path, run: str, text: str, code: int = 0) -> None:
    told = asdict(summary_of(text, run, code, 50.2))
    (folder / f"{run}.json").write_text(json.dumps(told))


def test_rows_of_the_sanitizer(tmp_path: Path, page: Path) -> None:
    answer = {"kernels": ["a", "b"], "calls": 1234, "wrong": [], "device": "H200", "torch": "2.13"}
    clean = f"{json.dumps(answer)}\n========= ERROR SUMMARY: 0 errors\n"
    for run in SANITIZER_RUNS:
        sanitized(tmp_path, run, clean)
    races = "========= RACECHECK SUMMARY: 5 hazards displayed (5 errors, 0 warnings)\n"
    sanitized(tmp_path, "racecheck", f"{json.dumps(answer)}\n{races}", 9)
    sanitized(tmp_path, "synccheck", "Killed\n", 137)
    assert main([str(tmp_path)]) == 0
    lines = held(page.read_text(), ON_GPU).splitlines()
    assert lines[0] == "H200, torch 2.13; unknown, torch unknown:"
    plain = "| 1,234 calls, 2 kernels | 50 s | none |"
    assert lines[4:] == [
        f"| sanitizer's set against float64 {plain}",
        f"| memcheck {plain}",
        f"| memcheck, random calls {plain}",
        "| racecheck | 1,234 calls, 2 kernels | 50 s | **5** |",
        "| synccheck | 0 calls, 0 kernels | 50 s | **1** |",
        f"| initcheck, fa2 {plain}",
        f"| initcheck, fa3 {plain}",
    ]


def test_failures_are_bold_and_so_is_what_was_stopped(tmp_path: Path) -> None:
    rows = [
        {"backend": backend, "seconds": 1.0, "figures": 3, "wrong": text}
        for backend, text in (("fa2", ""), ("fa3", "AssertionError"))
    ]
    there = {"device": "H200", "torch": "2.13"}
    (tmp_path / "big-fa3.json").write_text(json.dumps({**there, "cases": rows, "missing": 4}))
    (tmp_path / "other.json").write_text("[]")
    content = tables(tmp_path, "")[ON_GPU]
    assert "| large sizes | 2 cases on fa2 and fa3, 6 figures | 2 s | **1** |" in content
    assert "| large sizes | stopped: 4 not reached |  | **not finished** |" in content


def test_a_folder_without_summaries_changes_nothing(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text()
    assert main([str(tmp_path / "nothing")]) == 1
    assert page.read_text() == before
    assert "no summary of scripts/nightly" in capsys.readouterr().err
    begin, end = marks("x")
    assert replaced(f"a{begin}b{end}c", "x", "d\n") == f"a{begin}d\n{end}c"
