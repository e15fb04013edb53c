"""`python -m prefill info`: versions, devices, the build, and why a backend cannot run."""

from __future__ import annotations

import platform
from collections import defaultdict
from typing import Any

import torch

from prefill import support
from prefill._version import __version__
from prefill.backends import PRIORITY, NativeBackend
from prefill.text import table

NATIVE_BACKENDS = tuple(backend.name for backend in PRIORITY if isinstance(backend, NativeBackend))
DRIVER = "driver's CUDA"


def collect() -> dict[str, Any]:
    """Everything that `info` says, as plain data."""
    library = support.native()
    build = library.build
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [support.device_info(torch.device("cuda", index)) for index in range(count)]
    driver = support.driver_version()
    return {
        "versions": {
            "prefill": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch's CUDA": torch.version.cuda,
            DRIVER: support.cuda_text(driver) if driver else None,
        },
        "build": None
        if build is None
        else {
            "version": build.version,
            "cuda": build.cuda,
            "cutlass": build.cutlass,
            "torch_target": build.torch_target,
            "archs": {backend: list(archs) for backend, archs in build.archs.items()},
            "kernels": [
                {name: getattr(kernel, name) for name in support.Kernel.__dataclass_fields__}
                for kernel in build.kernels
            ],
        },
        "devices": [
            {
                "name": device.name,
                "capability": list(device.capability),
                "smem_per_block": device.smem_per_block,
                "backends": {
                    backend: support.backend_reason(library, backend, device.capability) or None
                    for backend in NATIVE_BACKENDS
                },
            }
            for device in devices
        ],
        "missing": library.missing or None,
    }


def render(info: dict[str, Any]) -> str:
    """`collect`'s answer as text."""
    versions = ", ".join(
        f"{name} {version or ('unknown' if name == DRIVER else 'none')}"
        for name, version in info["versions"].items()
    )
    lines = [versions, ""]
    build = info["build"]
    if build is None:
        lines += ["kernels: none"]
    else:
        lines += [
            f"build: {build['version']}, CUDA {build['cuda']}, CUTLASS {build['cutlass']}, "
            f"for torch {build['torch_target']} and later",
            "",
            table(
                ["backend", "archs", "dtypes", "head dims (qk x vo)"],
                [row for backend in build["archs"] for row in _kernel_rows(build, backend)],
            ),
        ]
    lines += ["", table(["device", "backend", "usable"], _device_rows(info))]
    return "\n".join(lines)


def _kernel_rows(build: dict[str, Any], backend: str) -> list[list[str]]:
    """A row for dtypes of the same head-dim classes."""
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for kernel in build["kernels"]:
        if kernel["backend"] == backend:
            classes[kernel["dtype"]].append(f"{kernel['head_dim_qk']}x{kernel['head_dim_vo']}")
    dtypes: defaultdict[str, list[str]] = defaultdict(list)
    for dtype in sorted(classes):
        dtypes[" ".join(classes[dtype])].append(dtype)
    archs = " ".join(build["archs"][backend])
    return [[backend, archs, " ".join(alike), dims] for dims, alike in dtypes.items()]


def _device_rows(info: dict[str, Any]) -> list[list[str]]:
    rows = []
    for index, device in enumerate(info["devices"]):
        major, minor = device["capability"]
        name = f"cuda:{index} {device['name']} ({major}.{minor})"
        for backend, reason in device["backends"].items():
            rows.append([name, backend, "yes" if reason is None else f"no: {reason}"])
    if not rows:
        why = info["missing"] or "no CUDA device is visible to torch"
        if info["versions"]["torch's CUDA"] is None:
            why = "this torch has no CUDA; " + why
        rows = [["no CUDA device", backend, f"no: {why}"] for backend in NATIVE_BACKENDS]
    rows.append(["any", "reference", "yes"])
    return rows
