"""`python -m prefill bench` as it is called, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_cases import FakeRunner
from prefill.__main__ import main
from prefill.bench import command, machine, timing
from prefill.bench.cases import GRIDS, Case
from prefill.bench.timing import Prepared


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lengths", "3k"], "its lengths are 512, 1k"),
        (["--lengths", "long"], "'long' is not a length"),
        (["--contenders", "fa9"], "contenders here are fa3, fa2, cudnn, flash"),
    ],
)
def test_arguments_that_leave_nothing(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sees a GPU, on which each contender takes a time that is known."""
    speeds = {"fa3": 660e12, "fa2": 400e12, "cudnn": 600e12, "flash": 350e12}

    def prepare(case: Case, chosen: Any, *_: Any) -> Prepared:
        prepared = Prepared(3)
        for contender in chosen:
            if contender.name not in speeds or (contender.name, case.length.kv) == ("flash", 1024):
                prepared.refused[contender.name] = "no kernel"
                continue
            noise = random.Random(0).uniform(1.0, 1.01)
            seconds = case.flop / speeds[contender.name] * noise
            prepared.runners.append(FakeRunner(contender.name, seconds, 1e-3, []))
        return prepared

    monkeypatch.setattr(timing, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "card", lambda device: {"name": "Fake GPU"})
    monkeypatch.setattr(machine, "nvidia_smi", lambda device: None)
    monkeypatch.setattr(machine, "SmClock", lambda device: lambda: None)
    monkeypatch.setattr(
        command, "host_times", lambda chosen, device: {"auto": timing.statistics([4e-6])._asdict()}
    )


@pytest.mark.usefixtures("fake_gpu")
def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "out.json"
    arguments = ["--quick", "--lengths", "512,1k", "--contenders", "fa3 fa2 cudnn flash"]
    assert main(["bench", *arguments, "--json", os.fspath(path)]) == 0
    written = json.loads(path.read_text())
    assert set(written) == {
        *("format", "grid", "regimes", "contenders", "effort", "software", "card"),
        *("nvidia_smi", "host", "cases", "seconds"),
    }
    assert written["grid"] == "core"
    assert written["host"] is None
    assert [case["name"] for case in written["cases"]] == [
        *("d128 512 full", "d128 1k full", "d128 512 causal", "d128 1k causal"),
    ]
    first, second = written["cases"][:2]
    assert first["ratios"]["burst"]["ours/cudnn"] == pytest.approx(1.1)
    assert first["results"]["fa3"]["burst"]["tflops"] == pytest.approx(660, rel=0.02)
    assert second["results"]["flash"] == {"refused": "no kernel"}
    printed = capsys.readouterr().out
    assert "burst, median TFLOP/s" in printed
    assert "sustained, median TFLOP/s" in printed
    assert "flash: refused: no kernel (d128 1k full, d128 1k causal)" in printed


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--quick", "--contenders", "fa3 cudnn", "--grid", "append"]
    assert main(["bench", *arguments, "--match", "kv8k", "--json", os.fspath(path)]) == 0
    arguments[-1] = "features"
    capsys.readouterr()
    arguments += ["--match", "4k soft cap", "--regime", "burst"]
    assert main(["bench", *arguments, "--json", os.fspath(path)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [case["name"] for case in written["cases"]] == ["d128 4k causal", "d128 4k soft cap"]
    assert written["cases"][1]["baseline"] == "d128 4k causal"
    assert "fa3/plain" in printed

    assert main(["bench", "--from-json", os.fspath(path)]) == 0
    shown = capsys.readouterr().out
    assert "Fake GPU" in shown
    assert "| case | fa3 | cudnn | ours/cudnn | fa3/plain |" in shown
    assert "| d128 4k soft cap | " in shown
    assert "| 1.00 |\n" in shown
    assert "sustained" not in shown


@pytest.mark.usefixtures("fake_gpu")
def test_tables_have_one_unit_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(GRIDS, "features", (*GRIDS["features"], GRIDS["append"][-1]))
    arguments = ["--grid", "features", "--regime", "burst", "--quick", "--contenders", "fa3"]
    assert main(["bench", *arguments]) == 0
    lengths, micro = capsys.readouterr().out.split("burst, median us of GPU time")
    assert "burst, median TFLOP/s of GPU time" in lengths
    assert "mask random" in lengths
    assert "mask tree" in micro
    assert "mask random" not in micro


def test_options_of_measuring_beside_a_written_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--grid", "core", "--json", "x.json", "--quick", "--regime", "burst"]
    assert main(["bench", "--from-json", "run.json", *options]) == 2
    said = capsys.readouterr().err
    assert said.endswith("leave out --grid, --quick, --json, --regime\n")


def test_what_no_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.json"
    assert main(["bench", "--from-json", os.fspath(path)]) == 2
    assert "cannot read" in capsys.readouterr().err
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        assert main(["bench", "--from-json", os.fspath(path)]) == 2
        assert os.fspath(path) in capsys.readouterr().err


@pytest.mark.usefixtures("fake_gpu")
def test_host_times_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--host"]) == 0
    printed = capsys.readouterr().out
    assert "4.00" in printed
    assert "TFLOP/s" not in printed


@pytest.mark.usefixtures("fake_gpu")
def test_a_wrong_result_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Prepared(3, [], {}, {"fa3": "rows 0 to 15: 9.0 times the tolerance"})
    monkeypatch.setattr(timing, "prepare", lambda *_: wrong)
    assert main(["bench", "--quick", "--lengths", "512", "--match", "causal"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "fa3: wrong: rows 0 to 15" in printed
