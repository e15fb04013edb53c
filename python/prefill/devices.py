"""Devices by name: those of this machine, and those whose facts alone are known."""

from __future__ import annotations

import re

import torch

from prefill import support
from prefill.support import DeviceInfo

DEVICES: dict[str, tuple[int, int]] = {
    "t4": (7, 5),
    "a100": (8, 0),
    "a10": (8, 6),
    "3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "5090": (12, 0),
}
"""Compute capabilities of devices that can be named."""
SMEM_PER_BLOCK: dict[tuple[int, int], int] = {
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}
"""Bytes of shared memory that a block may opt in to (CUDA C++ Programming Guide, capabilities)."""


def device_here(name: str | None) -> torch.device:
    """The device of that name; without one cuda where there is one, else the CPU.

    ValueError where this machine has none of that name.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    count = torch.cuda.device_count()
    if match is None or (name != "cpu" and int(match[1] or 0) >= count):
        raise ValueError(
            f"--device {name} is not here; expected cpu or one of {count} CUDA devices."
        )
    return torch.device(name)


def device_info_of(name: str | None) -> DeviceInfo:
    """The facts about a device that is here, or of which only the name is known.

    ValueError for a name that means neither.
    """
    number = re.fullmatch(r"sm_?(\d+)(\d)[af]?", (name or "").lower())
    capability = (int(number[1]), int(number[2])) if number else DEVICES.get((name or "").lower())
    if name is not None and capability is not None:
        smem = SMEM_PER_BLOCK.get(capability, 0)
        return DeviceInfo("cuda", 0, name.upper(), capability, smem, is_here=False)
    try:
        return support.device_info(device_here(name))
    except ValueError as error:
        raise ValueError(
            f"{error} To pretend a device name one of {', '.join(DEVICES)}, or a compute "
            "capability, as sm_86."
        ) from None
