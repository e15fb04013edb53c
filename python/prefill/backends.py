"""Which backend answers a call.

| priority | backend   | device                        | calls                                    |
|----------|-----------|-------------------------------|------------------------------------------|
| 1        | fa3       | compute capability 9.0        | what `NativeBackend` has nothing against |
| 2        | fa2       | compute capability 8.0 and up | likewise                                 |
| 3        | reference | any                           | all                                      |

"auto" takes the first that has no reason against the call. Where fa3 runs, no length or feature
makes fa2 the faster one: in all recorded cases it takes less time, one row over 4k keys (0.77 of
fa2's) included (docs/performance.md). A backend that the caller names passes through the same
question and never gives way to another in silence.
"""

from __future__ import annotations

from typing import Protocol

from prefill import kernel_dtype, support
from prefill.request import PrefillRequest
from prefill.support import DeviceInfo

MAX_LENGTH = 1 << 30
"""Kernels count rows and keys in 32 bits, with room for the sum of two lengths."""


class Backend(Protocol):
    """One way to compute a request."""

    @property
    def name(self) -> str: ...

    def unsupported_reasons(self, request: PrefillRequest, device: DeviceInfo) -> list[str]:
        """Why this backend cannot run the request on that device; empty if it can."""
        ...


class ReferenceBackend:
    """Torch operations in float64: every argument, any device, the oracle for the others."""

    name = "reference"

    def unsupported_reasons(self, request: PrefillRequest, device: DeviceInfo) -> list[str]:
        return []


class NativeBackend:
    """CUDA kernels; fa2 and fa3 differ in the devices and kernels that the build lists."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unsupported_reasons(self, request: PrefillRequest, device: DeviceInfo) -> list[str]:
        if device.type != "cuda":
            return [f"{self.name} needs a CUDA device, and the tensors are on {device.type}"]
        reasons = []
        reason = support.build_reason(
            self.name,
            device.capability,
            device.smem_per_block,
            kernel_dtype.of(self.name, request),
            request.head_dim_qk,
            request.head_dim_vo,
            device.is_here,
        )
        if reason:
            reasons.append(reason)
        if request.qo_len >= MAX_LENGTH or request.kv_len >= MAX_LENGTH:
            reasons.append(f"{self.name} takes qo_len and kv_len below 2^30")
        return reasons


PRIORITY: tuple[Backend, ...] = (NativeBackend("fa3"), NativeBackend("fa2"), ReferenceBackend())
BY_NAME: dict[str, Backend] = {backend.name: backend for backend in PRIORITY}


def resolve(request: PrefillRequest, device: DeviceInfo) -> str:
    """The name of the backend for the request; NotImplementedError if the named one cannot."""
    if request.backend == "auto":
        for backend in PRIORITY:
            if not backend.unsupported_reasons(request, device):
                return backend.name
        raise AssertionError("the reference backend takes every call")
    reasons = BY_NAME[request.backend].unsupported_reasons(request, device)
    if reasons:
        raise NotImplementedError(refusal(request, device, reasons))
    return request.backend


def refusal(request: PrefillRequest, device: DeviceInfo, reasons: list[str]) -> str:
    """What to say of a named backend that has reasons against the call: they, and who takes it."""
    able = [b.name for b in PRIORITY if not b.unsupported_reasons(request, device)]
    names = " or ".join(f"backend={name!r}" for name in able)
    return (
        f"backend={request.backend!r} cannot run this call: {'; '.join(reasons)}. {names} can; "
        f"backend='auto' takes {able[0]!r}."
    )
