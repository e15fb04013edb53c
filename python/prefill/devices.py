"""Devices by name: those of this machine, and those whose facts alone are known."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from prefill import support
from prefill.support import DeviceInfo


class NamedDevice(NamedTuple):
    """What is known of a device by its name."""

    capability: tuple[int, int]
    num_sms: int
    """Streaming multiprocessors that are switched on, of the largest variant sold by that name."""


DEVICES: dict[str, NamedDevice] = {
    "v100": NamedDevice((7, 0), 80),
    "t4": NamedDevice((7, 5), 40),
    "a100": NamedDevice((8, 0), 108),
    "a10": NamedDevice((8, 6), 72),
    "3090": NamedDevice((8, 6), 82),
    "l4": NamedDevice((8, 9), 58),
    "l40s": NamedDevice((8, 9), 142),
    "4090": NamedDevice((8, 9), 128),
    "h100": NamedDevice((9, 0), 132),
    "h200": NamedDevice((9, 0), 132),
    "b200": NamedDevice((10, 0), 148),
    "5090": NamedDevice((12, 0), 170),
}
"""Devices that can be named."""
SMEM_PER_BLOCK: dict[tuple[int, int], int] = {
    (7, 0): 96 << 10,
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}
"""Bytes of shared memory that a block may opt in to (CUDA C++ Programming Guide, capabilities)."""


def typical_num_sms(capability: tuple[int, int]) -> int:
    """SMs of the first device in `DEVICES` of that capability, or of the nearest one below it.

    0 where all devices there are newer.
    """
    older = [device for device in DEVICES.values() if device.capability <= capability]
    # max takes the first of equals.
    return max(older, key=lambda device: device.capability).num_sms if older else 0


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

    A compute capability, as sm_86, has the number of SMs that `typical_num_sms` says.

    ValueError for a name that means neither.
    """
    word = (name or "").lower()
    known = DEVICES.get(word)
    if number := re.fullmatch(r"sm_?(\d+)(\d)[af]?", word):
        capability = int(number[1]), int(number[2])
        known = NamedDevice(capability, typical_num_sms(capability))
    if name is not None and known is not None:
        smem = SMEM_PER_BLOCK.get(known.capability, 0)
        return DeviceInfo(
            "cuda", 0, name.upper(), known.capability, smem, known.num_sms, is_here=False
        )
    try:
        return support.device_info(device_here(name))
    except ValueError as error:
        raise ValueError(
            f"{error} To pretend a device name one of {', '.join(DEVICES)}, or a compute "
            "capability, as sm_86."
        ) from None
