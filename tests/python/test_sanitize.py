"""scripts/sanitize: which compute-sanitizer, which runs, and which answers are failures.

The GPU, the interpreter and the sanitizer are stand-ins; the sanitizer prints what it is told to.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stand_ins import ROOT, checkout, program, run_script

COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>(int)+0x150"
CALLS = (
    '{"kernels": ["fa3_float16_128x128"], "calls": 9, "wrong": [], '
    '"device": "H200", "torch": "2.13"}'
)


def log(*places: str, counted: int | None = None, calls: str = CALLS) -> str:
    """What initcheck prints of reads at these places of kernels."""
    reports = [
        f"========= Uninitialized __global__ memory read of size 2 bytes\n"
        f"=========     at {place}\n=========     by thread (1,0,0) in block (0,0,0)\n"
        for place in places
    ]
    errors = len(places) if counted is None else counted
    return f"{calls}\n{''.join(reports)}========= ERROR SUMMARY: {errors} errors\n"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    answer = f"echo '{CALLS}'"
    return checkout(tmp_path, f'case "$1" in *sanitizer_set.py) {answer} ;; esac')


def sanitize(scripts: Path, run: str, fa2: str, fa3: str, code: int = 9) -> tuple[int, str]:
    """The script's exit status and output where the sanitizer prints `fa2` for fa2, else `fa3`."""
    home = scripts.parents[1]
    texts = {"fa2": fa2, "fa3": fa3}
    for name, text in texts.items():
        (home / name).write_text(text)
    answer = f"""
echo "$*" >>{home}/asked
text={home}/fa3
case "$*" in *"--backend fa2"*) text={home}/fa2 ;; esac
cat "$text"
grep -q "SUMMARY: 0 " "$text" || exit {code}
"""
    sanitizer = str(program(home / "sanitizer", answer))
    wheel = str(next(scripts.parent.glob("dist/*.whl")))
    return run_script(
        scripts / "sanitize", wheel, *run.split(), home=home, COMPUTE_SANITIZER=sanitizer
    )


def summary(scripts: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scripts.parent / f"build/sanitize/{run}.json").read_text())
    return found


def test_initcheck_without_reports(scripts: Path) -> None:
    status, said = sanitize(scripts, "initcheck", log(), log())
    assert status == 0, said
    for run in ("initcheck-fa2", "initcheck-fa3"):
        assert f"{run}: clean; 1 kernels, 9 calls, 0 reports, " in said
        told = summary(scripts, run)
        assert (told["run"], told["device"], told["torch"]) == (run, "H200", "2.13")
        assert (told["kernels"], told["calls"], told["reports"], told["failed"]) == (1, 9, 0, "")
    assert {path.name for path in scripts.parent.glob("build/sanitize/*")} == {
        f"initcheck-{backend}.{kind}" for backend in ("fa2", "fa3") for kind in ("log", "json")
    }


@pytest.mark.parametrize(
    ("fa2", "fa3", "code", "failed"),
    [
        (log(COPY), log(COPY), 9, "fa2"),
        (log(), log(COPY), 9, "fa3"),
        (log(), log(calls="Killed"), 9, "fa3"),
        (log(), log(counted=1), 9, "fa3"),
        (log(), log(COPY), 1, "fa3"),
    ],
)
def test_any_report_of_initcheck_is_a_failure(
    scripts: Path, fa2: str, fa3: str, code: int, failed: str
) -> None:
    status, said = sanitize(scripts, "initcheck", fa2, fa3, code)
    assert status == 1
    assert f"initcheck-{failed}: FAILED: " in said
    assert summary(scripts, f"initcheck-{failed}")["failed"]


RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


@pytest.mark.parametrize("run", ["memcheck", "memcheck-fuzz", "synccheck", "racecheck"])
def test_any_report_of_another_tool_is_a_failure(scripts: Path, run: str) -> None:
    def said_of(reports: int) -> str:
        if run == "racecheck":
            return f"{CALLS}\n{RACES.format(reports, reports)}\n"
        return log(*[COPY] * reports)

    assert sanitize(scripts, run, "", said_of(0))[0] == 0
    assert summary(scripts, run)["failed"] == ""
    status, said = sanitize(scripts, run, "", said_of(3))
    assert status == 1
    assert f"{run}: FAILED: 3 reports, exit status 9" in said
    assert summary(scripts, run)["reports"] == 3


def test_a_run_that_was_cut_short_is_a_failure(scripts: Path) -> None:
    """Whatever the exit status: no calls, or no count."""
    for text in (log(calls="Killed"), f"{CALLS}\n"):
        status, said = sanitize(scripts, "memcheck", "", text + "\nSUMMARY: 0 ")
        assert status == 1
        assert "memcheck: FAILED: it ended with 0 " in said


def test_wrong_results_of_the_set_are_a_failure(scripts: Path) -> None:
    assert sanitize(scripts, "float64", "", "")[0] == 0
    wrong = CALLS.replace('"wrong": []', '"wrong": ["fa3_float16_128x128, causal: wrong"]')
    python = scripts.parents[1] / "bin/python"
    failing = python.read_text().replace(f"'{CALLS}'", f"'{wrong}'; exit 1")
    python.write_text(failing)
    status, said = sanitize(scripts, "float64", "", "")
    assert status == 1
    assert "float64: FAILED: fa3_float16_128x128, causal: wrong" in said
    assert not (scripts.parents[1] / "asked").exists()  # no sanitizer


def test_what_each_run_asks_for(scripts: Path) -> None:
    assert sanitize(scripts, "", log(), log())[0] == 0
    asked = (scripts.parents[1] / "asked").read_text().splitlines()
    tools = [words.split()[1] for words in asked]
    assert tools == ["memcheck", "memcheck", "racecheck", "synccheck", "initcheck", "initcheck"]
    assert all("--error-exitcode 9" in words for words in asked)
    assert [("--padding 32" in words) for words in asked] == [True] * 2 + [False] * 4
    assert asked[1].endswith("sanitizer_set.py --fuzz 400 --seed 1")
    assert asked[4].endswith("--backend fa2")
    assert asked[5].endswith("--backend fa3 --without copies")


def test_an_unknown_run_is_named(scripts: Path) -> None:
    status, said = sanitize(scripts, "memchekc", "", log())
    assert status == 2
    assert "unknown run 'memchekc'; allowed: initcheck float64 memcheck" in said


def test_where_compute_sanitizer_is_looked_for(scripts: Path, tmp_path: Path) -> None:
    """Named, on PATH, then in CUDA_HOME; both scripts ask the same function."""
    if Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        pytest.skip("one is in /usr/local/cuda, which is always looked at")
    in_home = program(tmp_path / "cuda/bin/compute-sanitizer", "true")
    on_path = program(tmp_path / "other/compute-sanitizer", "true")

    def found(**given: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f'set -eu; source "{scripts}/environment.sh"; compute_sanitizer'],
            env={"PATH": "/usr/bin:/bin", **given},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    home, path = str(tmp_path / "cuda"), f"{on_path.parent}:/usr/bin:/bin"
    assert found() == ""
    assert found(CUDA_HOME=home) == str(in_home)
    assert found(CUDA_HOME=home, PATH=path) == str(on_path)
    assert found(CUDA_HOME=home, PATH=path, COMPUTE_SANITIZER="/named") == "/named"
    for name in ("sanitize", "nightly"):
        assert "$(compute_sanitizer)" in (ROOT / "scripts" / name).read_text()
