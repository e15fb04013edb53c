"""What `python -m prefill bench` prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import prefill
from bench_cases import feature_cases, measured
from prefill.bench import machine, report
from prefill.bench.cases import GRIDS, expand

RESULTS = sorted((Path(__file__).parents[2] / "docs/results").glob("*.json"))


def test_case_result() -> None:
    result = measured()
    assert json.loads(json.dumps(result)) == result
    assert result["results"]["fa3"]["burst"] == pytest.approx(
        {
            "low": 0.95e-5,
            "median": 1e-5,
            "high": 1.05e-5,
            "samples": 3,
            "tflops": result["flop"] / 1e-5 / 1e12,
        }
    )
    assert result["results"]["fa3"]["sustained"]["sm_clock_mhz"] == 1550
    assert result["ratios"]["burst"] == pytest.approx({"ours/cudnn": 1.2, "fa2/flash": 1.1})


def test_ratios_of_those_that_ran() -> None:
    without_fa3 = measured(refused={"fa3": "no Hopper"})
    assert without_fa3["ratios"]["burst"]["ours/cudnn"] == pytest.approx(0.6)
    assert "fa2/flash" not in measured(refused={"flash": "no"})["ratios"]["burst"]
    assert "ours/cudnn" not in measured(wrong={"cudnn": "rows"})["ratios"]["burst"]


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cases = [
        measured(),
        measured("d128 16k causal", 2.0, refused={"flash": "None"}, wrong={"fa2": "rows"}),
    ]
    text = report.result_table(cases, ["fa3", "fa2", "cudnn", "flash"], "burst")
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "case",
        "---------------",
        "d128 512 full",
        "d128 16k causal",
        "geometric mean",
    ]
    assert text.splitlines()[2].split() == [
        *("d128", "512", "full", "429", "215", "358", "195", "1.20", "1.10")
    ]
    assert text.splitlines()[3].split()[4:] == ["WRONG", "91626", "-", "2.40", "-"]
    assert text.splitlines()[4].split()[2:] == ["1.697", "1.100"]
    assert max(map(len, text.splitlines())) <= 80


def test_ratios_to_other_libraries_have_columns_where_they_ran() -> None:
    """In a written run too, from before there were such columns."""
    case = measured() | {"ratios": {}}
    case["results"]["flash4"] = {"burst": {"median": 1.5e-5, "tflops": 286.0}}
    head, _, row = report.markdown_table([case], ["fa3", "cudnn", "flash4"], "burst").splitlines()
    assert head == "| case | fa3 | cudnn | flash4 | ours/cudnn | ours/flash4 |"
    assert row.endswith("| 286 | 1.20 | 1.50 |")


def test_ratio_to_plain() -> None:
    plain, capped, rope = cases = feature_cases()
    assert capped["baseline"] == plain["name"]
    assert plain["baseline"] is None
    assert capped["arguments"] == {"causal": True, "logits_soft_cap": 30.0}
    assert report.to_plain(capped, cases, "burst") == pytest.approx({"fa3": 0.5, "fa2": 1.0})
    assert report.to_plain(plain, cases, "burst") == {}
    assert report.to_plain(rope, cases, "burst") == {}
    assert report.to_plain(capped, cases, "sustained") == {}
    assert report.to_plain(capped, [capped], "burst") == {}
    # As many FLOP per second over fewer pairs is no slower.
    windowed = capped | {"results": {"fa3": {"burst": {"tflops": 700.0, "median": 1e-9}}}}
    base = plain["results"]["fa3"]["burst"]["tflops"]
    assert report.to_plain(windowed, cases, "burst") == pytest.approx({"fa3": 700.0 / base})


def test_table_of_features() -> None:
    cases = feature_cases()
    lines = report.markdown_table(cases, ["fa3", "fa2", "cudnn"], "burst").splitlines()
    assert lines == [
        "| case | fa3 | fa2 | cudnn | ours/cudnn | fa3/plain | fa2/plain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| d128 4k causal | 137 | 69 | 137 | 1.00 | - | - |",
        "| d128 4k soft cap | 69 | 69 | - | - | 0.50 | 1.00 |",
        "| d128 4k RoPE | - | - | - | - | - | - |",
        "| geometric mean |  |  |  | 1.000 | 0.500 | 1.000 |",
    ]
    text = report.result_table(cases, ["fa2", "cudnn"], "burst")
    assert text.splitlines()[0].split()[-2:] == ["ours/cudnn", "fa2/plain"]
    assert report.remarks(cases) == [
        "cudnn: refused: cudnn cannot (d128 4k soft cap, d128 4k RoPE)",
        "fa3: refused: fa3 cannot (d128 4k RoPE)",
        "fa2: refused: fa2 cannot (d128 4k RoPE)",
    ]


def test_remarks_and_progress() -> None:
    cases = [
        measured(name, refused={"flash": "no kernel"}) for name in ("d128 512 full", "d128 1k full")
    ]
    cases.append(measured("d128 2k full", refused={"flash": "no kernel"}, wrong={"fa3": "row 7"}))
    assert report.remarks(cases) == [
        "flash: refused: no kernel (d128 512 full, d128 1k full and 1 more)",
        "fa3: wrong: row 7 (d128 2k full)",
    ]
    assert report.any_wrong(cases)
    assert not report.any_wrong(cases[:2])
    assert report.progress(cases[0], "burst") == (
        "d128 512 full, burst: flash -, fa3 429, cudnn 358, fa2 215, ours/cudnn 1.20"
    )


def test_what_float8_is_multiplied_in_is_told() -> None:
    cases = expand(GRIDS["fp8"])
    results = []
    for name in ("d128 2k full", "d128 2k full float8", "d128 2k full float8 kv"):
        case = next(case for case in cases if case.name == name)
        dtypes = {"fa3": "bfloat16", "fa2": "bfloat16"}
        if case.variant.float8 == "qkv":
            dtypes["fa3"] = "float8_e4m3fn"
        results.append(report.case_result(case, 3, {}, {}, {}, dtypes))
    assert [result["multiplies_in"]["fa3"] for result in results] == [
        *("bfloat16", "float8_e4m3fn", "bfloat16")
    ]
    assert report.remarks(results) == [
        "fa3: multiplies qkv of float8 in float8_e4m3fn (d128 2k full float8)",
        "fa2: multiplies qkv of float8 in bfloat16 (d128 2k full float8)",
        "fa3: multiplies kv of float8 in bfloat16 (d128 2k full float8 kv)",
        "fa2: multiplies kv of float8 in bfloat16 (d128 2k full float8 kv)",
    ]
    for result in results:  # a run that was written before it was told
        del result["multiplies_in"]
    assert report.remarks(results) == []


def test_smi_line() -> None:
    line = "NVIDIA H200, 580.1, P0, 1980 MHz, 1980 MHz, 3201 MHz, 120.5 W, 700.00 W, 33"
    parsed = machine.parse_smi(line)
    assert parsed["driver_version"] == "580.1"
    assert parsed["power.draw"] == "120.5 W"
    assert set(parsed) == set(machine.SMI_FIELDS)


def test_software() -> None:
    told = machine.software()
    assert told["prefill"] == prefill.__version__
    assert told["commit"]
    assert told["torch"] == torch.__version__


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_tables_fit_the_terminal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts, which have every column once and each case in each."""
    monkeypatch.setenv("COLUMNS", "80")
    run = json.loads(path.read_text())
    names = run["contenders"]
    parts = report.result_table(run["cases"], names, "burst").split("\n\n")
    lines = [part.splitlines() for part in parts]
    assert max(len(line) for part in lines for line in part) <= 80
    columns = [part[0].split() for part in lines]
    assert [part[0] for part in columns] == ["case"] * len(parts)
    whole = report.markdown_table(run["cases"], names, "burst").splitlines()
    assert [name for part in columns for name in part[1:]] == whole[0].strip("| ").split(" | ")[1:]
    assert all(len(part) == len(whole) for part in lines)
