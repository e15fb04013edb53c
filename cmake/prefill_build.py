"""Build backend: scikit-build-core, plus the answer to "can this machine compile kernels?".

The answer decides what a build requires (torch, CUTLASS and, where there is no nvcc, nvcc from
PyPI) and whether CMake runs at all: a build without kernels is pure Python and needs no compiler.

CMake runs this file as a script to find nvcc, so that there is one search order:
CMAKE_CUDA_COMPILER, CUDACXX, nvcc on PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, then the
nvidia-cuda-nvcc package of the running interpreter. Behind the first two, which name a compiler,
one that is too old is passed over. `prefill_build.py requires` prints what a build
without isolation needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

ConfigSettings = dict[str, Any] | None

ROOT = Path(__file__).resolve().parents[1]

SCIKIT_BUILD_CORE = "scikit-build-core>=1.1.2,<2"
KERNEL_REQUIRES = ["torch>=2.10", "nvidia-cutlass==4.2.0.0"]
MINIMUM_NVCC = (12, 8)  # and in CudaToolchain.cmake
# Their own pins of each other are loose, so each is pinned here.
NVCC_REQUIRES = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
]
OFF_MESSAGE = """\
prefill: building WITHOUT CUDA kernels: no nvcc {minimum} or later was found, and
prefill: {why}.
prefill: the package will hold the reference backend alone. For kernels, put nvcc on PATH or set
prefill: CUDACXX or CUDA_HOME, or run `pip install {packages}`,
prefill: then install prefill again. PREFILL_KERNELS=OFF silences this, PREFILL_KERNELS=ON makes it
prefill: an error."""


def real_nvcc(candidate: Path) -> Path:
    """The compiler behind a wrapper script: ccache and the toolkit root need the real one."""
    dry_run = subprocess.run(
        [candidate, "--dryrun", "-E", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in dry_run.stderr.splitlines():
        if line.startswith("#$ TOP="):
            nvcc = Path(line.removeprefix("#$ TOP=").strip()) / "bin" / "nvcc"
            if nvcc.is_file():
                return nvcc.resolve()
    return candidate


@cache
def is_too_old(nvcc: Path) -> bool:
    """Whether nvcc says that it is older than the minimum; one that does not answer is not."""
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    too_old = match is not None and (int(match[1]), int(match[2])) < MINIMUM_NVCC
    if too_old:
        minimum = ".".join(map(str, MINIMUM_NVCC))
        print(f"prefill: {nvcc} is older than {minimum}: passed over", file=sys.stderr)
    return too_old


def packaged_nvccs() -> list[Path]:
    """The nvcc of the installed nvidia-cuda-nvcc packages (nvidia/cu13/bin/nvcc)."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec.submodule_search_locations if spec else None) or []
    return [
        nvcc
        for location in locations
        for nvcc in sorted(Path(location).glob("cu*/bin/nvcc"), reverse=True)
    ]


def find_nvcc(compiler: str | None = None) -> Path | None:
    """The first nvcc in the order of the module's docstring; one named but missing is an error."""
    for source, name in (
        ("CMAKE_CUDA_COMPILER", compiler),
        ("CUDACXX", os.environ.get("CUDACXX")),
    ):
        if name:
            found = shutil.which(name)
            if found is None:
                raise FileNotFoundError(f"{source} is {name!r}, which is not an executable file")
            return real_nvcc(Path(found))
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    on_path = shutil.which("nvcc")
    candidates = [Path(on_path)] if on_path else []
    candidates += [Path(root) / "bin" / "nvcc" for root in roots if root]
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and candidate.is_file():
            nvcc = real_nvcc(candidate)
            if not is_too_old(nvcc):
                return nvcc
    return next((nvcc for nvcc in packaged_nvccs() if not is_too_old(nvcc)), None)


def option(name: str, config_settings: ConfigSettings) -> str | None:
    """An option from `-C cmake.define.NAME=value`, else from the environment variable NAME."""
    settings = config_settings or {}
    for key in (f"cmake.define.{name}", f"skbuild.cmake.define.{name}"):
        if key in settings:
            value = settings[key]
            return str(value[-1] if isinstance(value, list) else value)
    return os.environ.get(name) or None


def kernels_mode(config_settings: ConfigSettings) -> str:
    """PREFILL_KERNELS as ON, OFF or AUTO."""
    value = (option("PREFILL_KERNELS", config_settings) or "AUTO").upper()
    value = {"1": "ON", "TRUE": "ON", "YES": "ON", "0": "OFF", "FALSE": "OFF", "NO": "OFF"}.get(
        value, value
    )
    if value not in ("ON", "OFF", "AUTO"):
        raise ValueError(f"PREFILL_KERNELS is {value!r}; allowed are ON, OFF and AUTO")
    return value


def nvcc_on_pypi() -> bool:
    """Whether the nvcc packages exist for this platform."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def kernel_requires(config_settings: ConfigSettings = None) -> list[str]:
    """What a build of the kernels needs besides scikit-build-core's own wishes."""
    mode = kernels_mode(config_settings)
    if mode == "OFF":
        return []
    if find_nvcc(option("CMAKE_CUDA_COMPILER", config_settings)):
        return KERNEL_REQUIRES
    if nvcc_on_pypi():
        return KERNEL_REQUIRES + NVCC_REQUIRES
    return KERNEL_REQUIRES if mode == "ON" else []


def settings_for_build(config_settings: ConfigSettings) -> tuple[dict[str, Any], str]:
    """The settings to build with and a message that says what is built.

    Without kernels, CMake is left out and the wheel is pure Python.
    """
    settings = dict(config_settings or {})
    mode = kernels_mode(config_settings)
    nvcc = find_nvcc(option("CMAKE_CUDA_COMPILER", config_settings)) if mode != "OFF" else None
    if nvcc or mode == "ON":
        return settings, f"prefill: building with kernels, nvcc: {nvcc}"
    settings = {key: value for key, value in settings.items() if "cmake.define." not in key}
    settings["wheel.cmake"] = "false"
    if mode == "OFF":
        return settings, "prefill: building without kernels, as PREFILL_KERNELS=OFF asks"
    if nvcc_on_pypi():
        why = "its packages are not installed in this environment"
    else:
        why = f"there are no packages of it for {sys.platform} {platform.machine()}"
    packages = " ".join(f"'{requirement}'" for requirement in NVCC_REQUIRES)
    return settings, OFF_MESSAGE.format(
        why=why, packages=packages, minimum=".".join(map(str, MINIMUM_NVCC))
    )


def uses_cmake(settings: dict[str, Any]) -> bool:
    return settings.get("wheel.cmake") != "false"


@contextmanager
def build_folder_alone() -> Iterator[None]:
    """Let one build at a time into the source tree's build folder, unlike CMake and Ninja.

    The system frees the lock when the process that holds it ends, in whatever way.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    folder = ROOT / "build"
    lock = None
    with suppress(OSError):  # a tree that is read-only, whose build folder is elsewhere
        folder.mkdir(exist_ok=True)
        lock = (folder / ".lock").open("a")
    if lock is None:
        yield
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"prefill: waiting for another build in {folder}"
            print(message, file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a filesystem without locks
            pass
        yield


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    from scikit_build_core import build

    extra = kernel_requires(config_settings)
    if not extra:
        return []
    return [*build.get_requires_for_build_wheel(config_settings), *extra]


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: ConfigSettings = None) -> list[str]:
    from scikit_build_core import build

    return build.get_requires_for_build_sdist(config_settings)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: ConfigSettings = None
) -> str:
    from scikit_build_core import build

    settings, _ = settings_for_build(config_settings)
    return build.prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: ConfigSettings = None
) -> str:
    from scikit_build_core import build

    settings, _ = settings_for_build(config_settings)
    return build.prepare_metadata_for_build_editable(metadata_directory, settings)


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    from scikit_build_core import build

    settings, message = settings_for_build(config_settings)
    print(message, file=sys.stderr, flush=True)
    with build_folder_alone() if uses_cmake(settings) else nullcontext():
        return build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    from scikit_build_core import build

    settings, message = settings_for_build(config_settings)
    print(message, file=sys.stderr, flush=True)
    with build_folder_alone() if uses_cmake(settings) else nullcontext():
        return build.build_editable(wheel_directory, settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: ConfigSettings = None) -> str:
    from scikit_build_core import build

    return build.build_sdist(sdist_directory, config_settings)


def main() -> int:
    parser = argparse.ArgumentParser(description="What CMake and the scripts ask of the build.")
    commands = parser.add_subparsers(dest="command", required=True)
    nvcc_command = commands.add_parser("nvcc", help="print the path of nvcc, or nothing")
    nvcc_command.add_argument("--compiler", help="the value of CMAKE_CUDA_COMPILER")
    commands.add_parser("requires", help="print what to install before --no-build-isolation")
    arguments = parser.parse_args()
    if arguments.command == "nvcc":
        print(find_nvcc(arguments.compiler) or "")
        return 0
    extra = kernel_requires()
    print("\n".join([SCIKIT_BUILD_CORE, *(["cmake>=3.26", "ninja"] if extra else []), *extra]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
