"""The build's search for nvcc, and what a source distribution holds."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prefill_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "prefill_build", ROOT / "cmake" / "prefill_build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "packaged_nvccs", list)
    return module


def fake_nvcc(root: Path, release: str) -> Path:
    """An nvcc that knows its version alone."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc_that_is_too_old_is_passed_over(
    prefill_build: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new, packaged = (
        fake_nvcc(tmp_path / release, release) for release in ("12.4", "12.8", "13.0")
    )
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(new.parents[1]))
    assert prefill_build.find_nvcc() == new
    assert capsys.readouterr().err.count(f"{old} is older than 12.8") == 1

    monkeypatch.setenv("CUDA_HOME", str(old.parents[1]))
    monkeypatch.setenv("CUDA_PATH", str(old.parents[1]))
    monkeypatch.setattr(prefill_build, "packaged_nvccs", lambda: [old, packaged])
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        assert prefill_build.find_nvcc() == packaged
    assert capsys.readouterr().err == ""

    assert prefill_build.find_nvcc(str(old)) == old  # named: CMake says what is wrong with it
    monkeypatch.setenv("CUDACXX", str(old))
    assert prefill_build.find_nvcc() == old


def test_one_minimum(prefill_build: ModuleType) -> None:
    text = (ROOT / "cmake" / "CudaToolchain.cmake").read_text()
    match = re.search(r"VERSION_LESS (\d+)\.(\d+)\)", text)
    assert match is not None
    assert (int(match[1]), int(match[2])) == prefill_build.MINIMUM_NVCC


BUILD_SDIST = """
import sys
sys.path.insert(0, "cmake")
import prefill_build
prefill_build.build_sdist(sys.argv[1])
"""


def test_source_distribution_is_what_git_has(tmp_path: Path) -> None:
    """Not what else lies in a checkout: an environment, a library, caches."""
    pytest.importorskip("scikit_build_core")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip(f"no git checkout: {listed.stderr}")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    strays = ["env/bin/activate", "python/prefill/_kernels.so", "tests/.pytest_cache/v/last"]
    checkout = tmp_path / "checkout"
    for name in (*tracked, *strays):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    for name in tracked:
        shutil.copy(ROOT / name, checkout / name)
    for name in strays:
        (checkout / name).write_text("stray")
    subprocess.run([sys.executable, "-c", BUILD_SDIST, str(tmp_path)], cwd=checkout, check=True)
    [archive] = tmp_path.glob("prefill-*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    assert names == {*tracked, "PKG-INFO"}
