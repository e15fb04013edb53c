"""What this build and this device can run.

The native library describes itself (`prefill::build_info`): which backends, architectures, dtypes
and head-dim classes are in it. Nothing here repeats that list, so a trimmed build needs no second
place to say so.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

LIBRARY_NAME = "_kernels.so"
NO_LIBRARY = (
    "this installation has no compiled kernels: it was built with PREFILL_KERNELS=OFF, or where no "
    "CUDA compiler was found; reinstall it with PREFILL_KERNELS=ON and nvcc on PATH (README.md)"
)

_F = TypeVar("_F", bound=Callable[..., Any])


def constant_under_compile(function: _F) -> _F:
    """Have torch.compile call the function while tracing and keep the answer.

    What `torch.compiler.assume_constant_result` does, which would import the compiler: seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts about a device that a backend's answer depends on."""

    type: str
    index: int = 0
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    smem_per_block: int = 0
    """Shared memory that a block may opt in to, bytes; 0 = unknown."""
    num_sms: int = 0
    """Streaming multiprocessors; 0 = unknown."""
    is_here: bool = True
    """Whether this machine has it: then its driver counts."""

    def __str__(self) -> str:
        if self.type != "cuda":
            return self.type
        major, minor = self.capability
        return f"cuda:{self.index} ({self.name}, compute capability {major}.{minor})"


@cache
def _device_info(device: torch.device) -> DeviceInfo:
    if device.type != "cuda":
        return DeviceInfo(device.type, device.index or 0)
    properties = torch.cuda.get_device_properties(device)
    return DeviceInfo(
        "cuda",
        device.index or 0,
        properties.name,
        (properties.major, properties.minor),
        getattr(properties, "shared_memory_per_block_optin", 0),
        properties.multi_processor_count,
    )


@constant_under_compile
def device_info(device: torch.device) -> DeviceInfo:
    """The facts about `device`, asked for once per device and process."""
    return _device_info(device)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of the build's kernel table."""

    backend: str
    dtype: str
    head_dim_qk: int
    head_dim_vo: int
    tile_m: int = 0
    tile_n: int = 0
    stages: int = 0
    threads: int = 0
    smem_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.backend}_{self.dtype}_{self.head_dim_qk}x{self.head_dim_vo}"


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What the native library says about itself."""

    version: str = ""
    cuda: str = ""
    cutlass: str = ""
    torch_target: str = ""
    archs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> BuildInfo:
        raw = json.loads(text)
        names = Kernel.__dataclass_fields__
        return cls(
            version=raw.get("version", ""),
            cuda=raw.get("cuda", ""),
            cutlass=raw.get("cutlass", ""),
            torch_target=raw.get("torch_target", ""),
            archs={backend: tuple(archs) for backend, archs in raw["archs"].items()},
            kernels=tuple(
                Kernel(**{key: value for key, value in row.items() if key in names})
                for row in raw["kernels"]
            ),
        )

    def kernels_of(self, backend: str) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.backend == backend]


@dataclass(frozen=True, slots=True, eq=False)
class NativeLibrary:
    """The compiled kernels, or why there are none. Compared by identity: it keys a cache."""

    build: BuildInfo | None
    missing: str = ""


def load_native() -> NativeLibrary:
    """Load the library into this process, once. A failure is a reason to report, no error."""
    namespace = torch.ops.prefill
    if not hasattr(namespace, "attention"):  # a second load would abort the process
        path = importlib.resources.files("prefill").joinpath(LIBRARY_NAME)
        if not path.is_file():
            return NativeLibrary(None, NO_LIBRARY)
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        except OSError as error:
            return NativeLibrary(None, _load_failure(error))
    return NativeLibrary(BuildInfo.from_json(namespace.build_info()))


def _load_failure(error: OSError) -> str:
    told = error.__cause__ or error  # torch's own error names the file alone
    reason = f"the compiled kernels do not load with torch {torch.__version__}: {told}; "
    if TorchVersion(torch.__version__) < TorchVersion("2.10"):
        return reason + "the package needs torch 2.10 or later: update torch"
    return reason + "build the package on this machine (docs/building.md)"


_native = load_native()


def native() -> NativeLibrary:
    return _native


@cache
def driver_version() -> int:
    """The newest CUDA that the driver serves, 1000 * major + 10 * minor; 0 = none or unknown.

    Asked for on first use: the import must not load the driver.
    """
    query = getattr(torch.ops.prefill, "driver_version", None)  # absent without the library
    return 0 if query is None else int(query())


def cuda_text(version: int) -> str:
    """12040 -> "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _parse_arch(arch: str) -> tuple[int, int, str, str]:
    """Split a CMake architecture: "90a-real" -> (9, 0, "a", "real"); kind "" is code and PTX."""
    number, _, kind = arch.partition("-")
    digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
    return int(digits[:-1]), int(digits[-1]), number[len(digits) :], kind


def arch_runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code built for `arch` runs on a device of that compute capability."""
    major, minor, suffix, kind = _parse_arch(arch)
    if suffix == "a":  # architecture-specific: that one device only, as machine code or PTX
        return capability == (major, minor)
    if suffix == "f":  # family-specific: same major, this minor or later
        return capability[0] == major and capability[1] >= minor
    machine_code = kind in ("", "real") and capability[0] == major and capability[1] >= minor
    ptx = kind in ("", "virtual") and capability >= (major, minor)
    return machine_code or ptx


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _class_order(kernel: Kernel) -> int:
    return kernel.head_dim_qk + kernel.head_dim_vo


def find_kernel(
    build: BuildInfo, backend: str, dtype: str, head_dim_qk: int, head_dim_vo: int
) -> Kernel | None:
    """The smallest head-dim class in the build that holds the heads: the library's own rule."""
    fitting = [
        kernel
        for kernel in build.kernels_of(backend)
        if kernel.dtype == dtype
        and kernel.head_dim_qk >= head_dim_qk
        and kernel.head_dim_vo >= head_dim_vo
    ]
    return min(fitting, key=_class_order, default=None)


def backend_reason(
    library: NativeLibrary, backend: str, capability: tuple[int, int], is_here: bool = True
) -> str:
    """Why nothing of `backend` runs on such a device; "" if something does.

    A device that is not here would have another driver than this machine's.
    """
    build = library.build
    if build is None:
        return library.missing
    archs = build.archs.get(backend, ())
    if not archs:
        return f"{backend} is not in this build, which has {', '.join(build.archs) or 'none'}"
    if not any(arch_runs_on(arch, capability) for arch in archs):
        return (
            f"the device has compute capability {capability[0]}.{capability[1]}; "
            f"this build's {backend} is for {', '.join(archs)}"
        )
    driver = driver_version() if is_here else 0
    needed = build.cuda.partition(".")[0]
    if driver and needed and driver // 1000 < int(needed):
        return (
            f"the driver serves CUDA {cuda_text(driver)} and this build needs {needed}.x: update "
            "the driver, or rebuild with an older CUDA toolkit"
        )
    return ""


@lru_cache(maxsize=1024)
def _build_reason(
    library: NativeLibrary,
    backend: str,
    capability: tuple[int, int],
    smem_per_block: int,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    is_here: bool,
) -> str:
    build = library.build
    reason = backend_reason(library, backend, capability, is_here)
    if reason or build is None:
        return reason
    kernels = build.kernels_of(backend)
    name = dtype_name(dtype)
    if name not in {kernel.dtype for kernel in kernels}:
        have = ", ".join(sorted({kernel.dtype for kernel in kernels}))
        return f"{name} is not in this build of {backend}, which has {have}"
    kernel = find_kernel(build, backend, name, head_dim_qk, head_dim_vo)
    if kernel is None:
        have = ", ".join(
            f"{k.head_dim_qk}/{k.head_dim_vo}"
            for k in sorted(kernels, key=_class_order)
            if k.dtype == name
        )
        return (
            f"head_dim_qk={head_dim_qk} with head_dim_vo={head_dim_vo} fits no kernel in this "
            f"build of {backend}, which has {have}"
        )
    if smem_per_block and kernel.smem_bytes > smem_per_block:
        return (
            f"kernel {kernel.name} needs {kernel.smem_bytes} bytes of shared memory per block; the "
            f"device has {smem_per_block}"
        )
    return ""


@lru_cache(maxsize=1024)
def _has_kernel(
    library: NativeLibrary, backend: str, dtype: torch.dtype, head_dim_qk: int, head_dim_vo: int
) -> bool:
    build = library.build
    return build is not None and (
        find_kernel(build, backend, dtype_name(dtype), head_dim_qk, head_dim_vo) is not None
    )


@constant_under_compile
def has_kernel(backend: str, dtype: torch.dtype, head_dim_qk: int, head_dim_vo: int) -> bool:
    """Whether the build has a kernel of `backend` for these, whatever the device."""
    return _has_kernel(_native, backend, dtype, head_dim_qk, head_dim_vo)


@constant_under_compile
def build_reason(
    backend: str,
    capability: tuple[int, int],
    smem_per_block: int,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    is_here: bool = True,
) -> str:
    """Why the build has no kernel of `backend` for these on such a device; "" if it has one."""
    return _build_reason(
        _native, backend, capability, smem_per_block, dtype, head_dim_qk, head_dim_vo, is_here
    )
