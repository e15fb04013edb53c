"""scripts/sanitize and scripts/nightly: which compute-sanitizer, and which answers are failures.

The GPU, the interpreter and the sanitizer are stand-ins; the sanitizer prints what it is told to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>(int)+0x150"
OURS = "void prefill::combine_rows<float>(prefill::Merge)+0x90"
OF_OURS = "void at::native::direct_copy_kernel_cuda<prefill::Merge>(int)+0x20"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>(int)+0x40"
CALLS = '{"kernels": ["fa3_float16_128x128"], "calls": 9, "wrong": []}'


def log(*places: str, counted: int | None = None, calls: str = CALLS) -> str:
    """What initcheck prints of reads at these places of kernels."""
    reports = [
        f"========= Uninitialized __global__ memory read of size 2 bytes\n"
        f"=========     at {place}\n=========     by thread (1,0,0) in block (0,0,0)\n"
        for place in places
    ]
    errors = len(places) if counted is None else counted
    return f"{calls}\n{''.join(reports)}========= ERROR SUMMARY: {errors} errors\n"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """A checkout with the scripts alone, and stand-ins on PATH."""
    copied = tmp_path / "root/scripts"
    copied.mkdir(parents=True)
    for name in ("environment.sh", "sanitize"):
        shutil.copy(ROOT / "scripts" / name, copied)
    (tmp_path / "root/a.whl").touch()
    program(tmp_path / "bin/nvidia-smi", 'echo "GPU 0: a stand-in"')
    program(tmp_path / "bin/python", "true")
    return copied


def sanitize(scripts: Path, tool: str, fa2: str, fa3: str, code: int = 9) -> tuple[int, str]:
    """The script's exit status and output where the sanitizer prints `fa2` for fa2, else `fa3`."""
    home = scripts.parents[1]
    texts = {"fa2": fa2, "fa3": fa3}
    for name, text in texts.items():
        (home / name).write_text(text)
    answer = f"""
text={home}/fa3
case "$*" in *"--backend fa2"*) text={home}/fa2 ;; esac
cat "$text"
grep -q "ERROR SUMMARY: 0 errors" "$text" || exit {code}
"""
    done = subprocess.run(
        [str(scripts / "sanitize"), str(scripts.parent / "a.whl"), tool],
        env={
            "PATH": f"{home}/bin:{os.environ['PATH']}",
            "PYTHON": str(home / "bin/python"),
            "COMPUTE_SANITIZER": str(program(home / "sanitizer", answer)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_initcheck_without_reports(scripts: Path) -> None:
    status, said = sanitize(scripts, "initcheck", log(), log())
    assert status == 0, said
    assert "initcheck-fa2: clean, " in said
    assert "initcheck-fa3: clean, " in said
    assert {path.name for path in scripts.parent.glob("build/sanitize/*")} == {
        "initcheck-fa2.log",
        "initcheck-fa3.log",
    }


def test_torchs_copies_of_what_tma_wrote_are_no_failure_and_are_told(scripts: Path) -> None:
    status, said = sanitize(scripts, "initcheck", log(), log(COPY, COPY, COPY))
    assert status == 0, said
    assert "initcheck-fa3: clean, but for torch's copies" in said
    assert "ERROR SUMMARY: 3 errors" in said


@pytest.mark.parametrize(
    ("fa2", "fa3", "code", "failed"),
    [
        (log(COPY), log(COPY), 9, "fa2"),
        (log(), log(COPY, OURS, COPY), 9, "fa3"),
        (log(), log(COPY, OF_OURS), 9, "fa3"),
        (log(), log(FILL), 9, "fa3"),
        (log(), log(COPY, counted=2), 9, "fa3"),  # what is not printed may be anything
        (log(), log(COPY, calls="Killed"), 9, "fa3"),
        (log(), log(counted=1), 9, "fa3"),
        (log(), log(COPY), 1, "fa3"),
    ],
)
def test_other_reports_of_initcheck_are_failures(
    scripts: Path, fa2: str, fa3: str, code: int, failed: str
) -> None:
    status, said = sanitize(scripts, "initcheck", fa2, fa3, code)
    assert status == 1
    assert f"initcheck-{failed}: FAILED ({code})" in said


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_any_report_of_another_tool_is_a_failure(scripts: Path, tool: str) -> None:
    assert sanitize(scripts, tool, "", log())[0] == 0
    status, said = sanitize(scripts, tool, "", log(COPY))
    assert status == 1
    assert f"{tool}: FAILED (9)" in said


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
