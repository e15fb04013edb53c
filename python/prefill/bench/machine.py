"""Where and with what a benchmark ran."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.resources
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from prefill import support
from prefill._version import __version__

SMI_FIELDS = (
    "name",
    "driver_version",
    "pstate",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
PEERS = {
    "flashinfer": "flashinfer-python",
    "flash_attn_4": "flash-attn-4",
    "cudnn_frontend": "nvidia-cudnn-frontend",
}
"""Packages of other libraries, by their name in the JSON."""
_NVML_CLOCK_SM = 1


def software() -> dict[str, Any]:
    """Versions, and the commit of the source tree, if this is one."""
    library = Path(str(importlib.resources.files("prefill").joinpath(support.LIBRARY_NAME)))
    kernels = hashlib.sha256(library.read_bytes()).hexdigest() if library.is_file() else None
    cudnn: Any = torch.backends.cudnn
    return {
        "prefill": __version__,
        "commit": commit() or __version__,
        "kernels_sha256": kernels,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        **{name: _version(package) for name, package in PEERS.items()},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """HEAD of the repository that holds this package or the working directory, if it is ours."""
    for place in (Path(__file__).parent, Path.cwd()):
        root = _output(["git", "-C", str(place), "rev-parse", "--show-toplevel"])
        if root is None or not Path(root, "python", "prefill", "_version.py").is_file():
            continue
        head = _output(["git", "-C", root, "rev-parse", "HEAD"])
        if head is not None:
            changes = _output(["git", "-C", root, "status", "--porcelain", "-uno"])
            return head + ("-dirty" if changes else "")
    return None


def card(device: torch.device) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": properties.total_memory,
    }


def nvidia_smi(device: torch.device) -> dict[str, str] | None:
    """What nvidia-smi says of the device now; None without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    uuid = device_uuid(device)
    text = _output([*command, "-i", uuid] if uuid else command)
    return parse_smi(text.splitlines()[0]) if text else None


def parse_smi(line: str) -> dict[str, str]:
    return dict(zip(SMI_FIELDS, (value.strip() for value in line.split(",")), strict=False))


def device_uuid(device: torch.device) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


class SmClock:
    """The SM clock in MHz at the moment, by NVML, which the driver brings; None where it fails."""

    def __init__(self, device: torch.device) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        uuid = device_uuid(device)
        try:
            library: Any = ctypes.CDLL("libnvidia-ml.so.1")
            if (
                uuid is not None
                and library.nvmlInit_v2() == 0
                and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle))
                == 0
            ):
                self._library = library
        except (OSError, AttributeError):
            pass

    def __call__(self) -> int | None:
        if self._library is None:
            return None
        clock = ctypes.c_uint()
        failed = self._library.nvmlDeviceGetClockInfo(
            self._handle, _NVML_CLOCK_SM, ctypes.byref(clock)
        )
        return None if failed else clock.value


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
