"""A short benchmark on the GPU: it runs, its figures are possible, and its results are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prefill import support
from prefill.__main__ import main
from prefill.bench.contenders import available


def test_bench(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--contenders", f"{backend},flash", "--match", "causal", "--lengths", "512 8k"]
    assert main(["bench", "--quick", *arguments, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    short, long = written["cases"]
    assert short["input_sets"] > long["input_sets"] >= 3
    for case in written["cases"]:
        for regime in ("burst", "sustained"):
            figures = case["results"][backend][regime]
            assert 0 < figures["low"] <= figures["median"] <= figures["high"]
            assert 1 < figures["tflops"] < 3000
    assert written["software"]["kernels_sha256"] is not None


def test_tree_mask(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    grid = ["--grid", "append", "--match", "mask tree", "--contenders", f"{backend},cudnn"]
    assert main(["bench", "--quick", "--regime", "burst", *grid, "--json", str(path)]) == 0
    plain, tree = json.loads(path.read_text())["cases"]
    assert tree["baseline"] == plain["name"]
    for case in (plain, tree):
        assert 1 < case["results"][backend]["burst"]["tflops"] < 3000


def test_rope(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    grid = ["--grid", "features", "--match", "4k RoPE", "--contenders", f"{backend},cudnn"]
    assert main(["bench", "--quick", "--regime", "burst", *grid, "--json", str(path)]) == 0
    plain, rope = json.loads(path.read_text())["cases"]
    assert rope["baseline"] == plain["name"]
    assert 1 < rope["results"][backend]["burst"]["tflops"] < 3000
    assert "SDPA has no ROPE_LLAMA" in rope["results"]["cudnn"]["refused"]


def test_fp8(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    grid = ["--grid", "fp8", "--match", "d128 2k causal float8", "--contenders", f"{backend},cudnn"]
    assert main(["bench", "--quick", "--regime", "burst", *grid, "--json", str(path)]) == 0
    plain, whole, by_tensor, mixed = json.loads(path.read_text())["cases"]
    for case, float8 in ((plain, ""), (whole, "qkv"), (by_tensor, "qkv"), (mixed, "kv")):
        assert case["float8"] == float8
        assert case["baseline"] == (plain["name"] if float8 else None)
        assert 1 < case["results"][backend]["burst"]["tflops"] < 3000
    assert plain["multiplies_in"][backend] == mixed["multiplies_in"][backend] == "bfloat16"
    native = support.has_kernel(backend, torch.float8_e4m3fn, 128, 128)
    for case in (whole, by_tensor):
        assert case["multiplies_in"][backend] == ("float8_e4m3fn" if native else "bfloat16")
        assert "SDPA has no scale_q" in case["results"]["cudnn"]["refused"]


@pytest.mark.parametrize(
    ("name", "grid", "case"),
    [
        ("flash4", "core", "d128 512 causal"),
        ("cudnn8", "fp8", "d128 2k causal float8 by tensor"),
    ],
)
def test_other_libraries(name: str, grid: str, case: str, tmp_path: Path) -> None:
    if name not in available():
        pytest.skip(f"{name} is not installed")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("not Hopper or later")
    path = tmp_path / "out.json"
    arguments = ["--grid", grid, "--match", case, "--contenders", name, "--json", str(path)]
    assert main(["bench", "--quick", "--regime", "burst", *arguments]) == 0
    ran = json.loads(path.read_text())["cases"][-1]
    assert ran["name"] == case
    assert 1 < ran["results"][name]["burst"]["tflops"] < 3000


def test_host(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["bench", "--host", "--contenders", backend, "--json", str(path)]) == 0
    host = json.loads(path.read_text())["host"]
    assert all(1e-7 < host[name]["median"] < 1e-3 for name in ("auto", backend))
