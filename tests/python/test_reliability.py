"""docs/reliability.md: what it names exists, and its table is made of summaries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import big
import fuzz
import reliability_table
import soak
from reliability_table import BEGIN, END, NO_RUNS, PAGE, held, replaced, table

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
    assert text.count(BEGIN) == text.count(END) == 1
    assert held(text)


def test_a_table_of_real_summaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made of what the programs write, so that neither changes alone."""
    few = {"causal": soak.CASES["causal"]}
    monkeypatch.setattr(soak, "CASES", few)
    options = ["--device=cpu", f"--json={tmp_path}/soak.json", "--repeats=2", "--seconds=0.1"]
    assert soak.main([*options, "--check=repeats", "--check=second_gpu"]) == 0
    options = ["--device=cpu", f"--json={tmp_path}/big.json"]
    assert big.main([*options, "--case=grids", "--case=too_long"]) == 0
    args = fuzz.parse(["--device=cpu", "--cases=4", "--backend=reference"])
    tally = fuzz.Tally()
    for number in range(4):
        case = fuzz.numbered(0, number, args.backends, "cpu")
        tally.add(case, fuzz.outcome(case, "cpu"))
    made = {"seed": 3, "seconds": 61.4, "device": "H200", "torch": "2.13"} | tally.as_json()
    (tmp_path / "fuzz.json").write_text(json.dumps(made))

    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}{NO_RUNS}{END}after\n")
    monkeypatch.setattr(reliability_table, "PAGE", page)
    reliability_table.main([str(tmp_path), "abc"])
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}H200, torch 2.13; cpu, torch ")
    assert text.endswith(f"|\n{END}after\n")
    assert capsys.readouterr().out.endswith(held(text))
    lines = held(text).splitlines()
    assert lines[0].endswith(", commit abc:")
    assert re.fullmatch(
        r"\| fuzzing \| 4 cases of seed 3: \d on reference; \d refused, \d malformed ones rejected "
        r"\| 61 s \| none \|",
        lines[4],
    )
    assert lines[5].startswith("| large sizes | 2 cases, ")
    assert re.fullmatch(r"\| soak: repeats \| 2 results compared \| \d+ s \| none \|", lines[6])
    assert "| soak: second gpu | skipped: no second GPU | 0 s | none |" in lines


def test_failures_are_bold(tmp_path: Path) -> None:
    rows = [{"seconds": 1.0, "figures": 3, "wrong": text} for text in ("", "AssertionError")]
    summary = {"device": "H200", "torch": "2.13", "cases": rows}
    (tmp_path / "big.json").write_text(json.dumps(summary))
    assert "| large sizes | 2 cases, 6 figures | 2 s | **1** |" in table(tmp_path, "")
    assert table(tmp_path / "nothing", "") == NO_RUNS
    assert replaced(f"a{BEGIN}b{END}c", "d\n") == f"a{BEGIN}d\n{END}c"
