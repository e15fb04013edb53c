"""Builds and installs under stress: at once, offline, without a home, in folders with spaces.

What is built is the source tree with hollow kernels, and the pure package. Every command runs with
a home folder that cannot be made, since it would lie below a file, and without a network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import prefill
from hollow import NUM_KERNELS, OPTIONS, hollow_tree

for module in ("scikit_build_core", "pip"):
    pytest.importorskip(module)

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
CLEARED = ("PYTHONPATH", "CCACHE_DIR")
NO_NVCC = {"CUDACXX": "", "CUDA_HOME": "", "CUDA_PATH": ""}
CALL = """
import torch, prefill
q = torch.ones(5, 2, 64, dtype=torch.float16)
assert bool((prefill.single_prefill_with_kv_cache(q, q, q, causal=True) == 1).all())
"""


@cache
def without_network() -> tuple[str, ...]:
    """What runs a command without any network, where the system lets us."""
    prefix = ("unshare", "--map-root-user", "--net")
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    except OSError:
        return ()
    return () if done.returncode else prefix


def environment(folder: Path, **given: str) -> dict[str, str]:
    (folder / "a file").touch()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in CLEARED and not name.startswith(("PIP_", "PREFILL_", "XDG_", "SKBUILD_"))
    }
    nowhere = "http://127.0.0.1:9"  # the port that discards
    return kept | {
        "HOME": str(folder / "a file/home"),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "http_proxy": nowhere,
        "https_proxy": nowhere,
        **given,
    }


def start(folder: Path, *command: str | Path, **given: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*without_network(), sys.executable, *(str(part) for part in command)],
        cwd=folder,
        env=environment(folder, **given),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=500)
    return process.returncode, said


def make_wheel(tree: Path, target: Path, **given: str) -> subprocess.Popen[str]:
    options = ("--verbose", "--no-build-isolation", "--no-deps", "--wheel-dir")
    return start(tree.parent, "-m", "pip", "wheel", *options, target, tree, **given)


def install(wheel: Path, target: Path) -> subprocess.Popen[str]:
    options = ("--no-deps", "--target")
    return start(target.parent, "-m", "pip", "install", *options, target, wheel)


def wheel_of(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def loaded_kernels(site: Path, elsewhere: Path) -> int:
    """How many kernels the package installed there says it has, once a call was right."""
    given = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    status, said = ended(start(elsewhere, "-c", CALL, **given))
    assert status == 0, said
    status, said = ended(start(elsewhere, "-m", "prefill", "info", "--json", **given))
    assert status == 0, said
    build = json.loads(said)["build"]
    return 0 if build is None else len(build["kernels"])


def broken_ccache(folder: Path) -> Path:
    """A folder for PATH with a ccache that has no place for its cache."""
    program = folder / "programs/ccache"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'ccache: error: Read-only file system' >&2\nexit 1\n")
    program.chmod(0o755)
    return program.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a folder with spaces and ü"
    made.mkdir()
    return made


def nvcc() -> Path | None:
    spec = importlib.util.spec_from_file_location("build", ROOT / "cmake/prefill_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Path | None = module.find_nvcc()
    return found


def test_kernels_at_once_offline_without_a_home_or_ccache(folder: Path) -> None:
    """Two builds of one tree, then installs of both: each library loads."""
    if nvcc() is None:
        pytest.skip("no nvcc: nothing to build kernels with")
    tree = hollow_tree(folder / "source tree")
    path = f"{BIN}{os.pathsep}{broken_ccache(folder)}{os.pathsep}{os.environ['PATH']}"
    targets = [folder / f"wheels {n}" for n in range(2)]
    builds = [make_wheel(tree, target, PATH=path, **OPTIONS) for target in targets]
    answers = [ended(build) for build in builds]
    assert [status for status, _ in answers] == [0, 0], "\n".join(said for _, said in answers)
    said = answers[0][1] + answers[1][1]
    assert said.count("waiting for another build in ") == 1
    assert said.count("ccache is left out, as it does not work: ccache: error: Read-only") == 2
    sites = [folder / f"site packages {n}" for n in range(2)]
    installs = [
        install(wheel_of(target), site) for target, site in zip(targets, sites, strict=True)
    ]
    assert [ended(process)[0] for process in installs] == [0, 0]
    assert [loaded_kernels(site, folder) for site in sites] == [NUM_KERNELS] * 2


def test_pure_packages_at_once(folder: Path) -> None:
    """Four builds of one tree, which stays as it was, and an install of each."""
    tree = hollow_tree(folder / "source tree")
    before = sorted(tree.rglob("*"))
    targets = [folder / f"wheels {n}" for n in range(4)]
    builds = [make_wheel(tree, target, PREFILL_KERNELS="OFF") for target in targets]
    for build in builds:
        status, said = ended(build)
        assert status == 0, said
    assert sorted(tree.rglob("*")) == before
    sites = [folder / f"site packages {n}" for n in range(4)]
    installs = [
        install(wheel_of(target), site) for target, site in zip(targets, sites, strict=True)
    ]
    assert [ended(process)[0] for process in installs] == [0] * 4
    assert [loaded_kernels(site, folder) for site in sites[:1]] == [0]


def hide_nvcc(tree: Path, folder: Path) -> dict[str, str]:
    """The environment in which no nvcc is found, nor any of PyPI's in this interpreter."""
    (folder / "hiding/nvidia").mkdir(parents=True)
    (folder / "hiding/nvidia/__init__.py").touch()
    build = tree / "cmake/prefill_build.py"
    text = build.read_text()
    assert text.count('"/usr/local/cuda"]') == 1
    build.write_text(text.replace('"/usr/local/cuda"]', '"/nowhere"]'))
    programs = folder / "programs"
    programs.mkdir()
    for name in ("cmake", "ninja", "c++", "g++", "cc", "gcc"):
        if found := shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ['PATH']}"):
            (programs / name).symlink_to(found)
    path = os.pathsep.join([str(programs), "/usr/bin", "/bin"])
    if shutil.which("nvcc", path=path):
        pytest.skip("nvcc lies in /usr/bin: it cannot be hidden")
    return {"PATH": path, "PYTHONPATH": str(folder / "hiding"), **NO_NVCC}


def test_without_nvcc_the_package_is_pure_and_says_so(folder: Path) -> None:
    tree = hollow_tree(folder / "source tree")
    status, said = ended(make_wheel(tree, folder / "wheels", **hide_nvcc(tree, folder)))
    assert status == 0, said
    assert "building WITHOUT CUDA kernels: no nvcc 12.8 or later was found" in said
    assert wheel_of(folder / "wheels").name.endswith("-py3-none-any.whl")


def test_without_nvcc_kernels_that_are_asked_for_are_an_error(folder: Path) -> None:
    tree = hollow_tree(folder / "source tree")
    given = OPTIONS | hide_nvcc(tree, folder)
    status, said = ended(make_wheel(tree, folder / "wheels", **given))
    assert status != 0
    assert "No nvcc 12.8 or later: not in CMAKE_CUDA_COMPILER, CUDACXX, PATH" in " ".join(
        said.split()
    )
    assert "PREFILL_KERNELS=OFF builds the package without kernels." in " ".join(said.split())


def test_a_torch_that_is_too_old_is_named(folder: Path) -> None:
    """Of two in the interpreter's path the first counts."""
    if nvcc() is None:
        pytest.skip("no nvcc: torch is not looked for")
    old = folder / "old/torch"
    (old / "lib").mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "version.py").write_text("__version__ = '2.9.1+cu128'\n")
    (old / "lib/libtorch_cpu.so").touch()
    tree = hollow_tree(folder / "source tree")
    given = OPTIONS | {"PYTHONPATH": str(old.parent)}
    status, said = ended(make_wheel(tree, folder / "wheels", **given))
    assert status != 0
    assert f"torch 2.9.1 at {old}: 2.10 is needed." in " ".join(said.split())


def test_the_library_in_a_folder_with_spaces(folder: Path) -> None:
    """The one that is installed, elsewhere."""
    installed = Path(prefill.__file__).parent
    shutil.copytree(installed, folder / "site packages/prefill")
    build = prefill.support.native().build
    expected = 0 if build is None else len(build.kernels)
    assert loaded_kernels(folder / "site packages", folder) == expected
