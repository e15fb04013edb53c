"""What a call would do, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefill import kernel_dtype, ops, support
from prefill.backends import PRIORITY, refusal, resolve
from prefill.request import FP8_DTYPES, PrefillRequest
from prefill.split_plan import split_plan
from prefill.support import DeviceInfo, Kernel


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `print` it, or read its fields."""

    backend: str | None
    """The backend that would run; None where the call would raise NotImplementedError."""
    reason: str
    """Why that one, or the text of the error."""
    rejected: dict[str, tuple[str, ...]]
    """For each backend that cannot run the call: every reason."""
    device: str
    kernel: str | None
    """The kernel variant: backend, dtype and head-dim class; None where no kernel is launched."""
    tile: tuple[int, int] | None
    """(query rows, keys) of one step of the kernel."""
    num_splits: int
    """How many parts of a row tile's keys are computed apart and merged; 1 = no split, 0 = nothing
    is launched.
    """
    copies: tuple[str, ...]
    """Tensors that pass through a copy first, with the reason."""
    passes: tuple[str, ...] = ()
    """Tensors that a pass before the kernel rotates, widens or transposes, on the way into a copy,
    and how; and the output, where the kernel cannot write its dtype.
    """
    packed_heads: int = 1
    """Query heads of one key head whose rows share a row tile; 1 = each head has its own."""
    num_row_tiles: int = 0
    """Row tiles of the kernel over all heads; 0 = no kernel is launched."""
    num_whole_tiles: int = 0
    """Of these the first ones, so many, are not split even where `num_splits` is above 1."""
    dtype: str | None = None
    """What the kernel multiplies in, as in its name; float8 tensors are widened to any other."""

    def __str__(self) -> str:
        lines = [f"backend: {self.backend or 'none'} ({self.reason})", f"device:  {self.device}"]
        if self.kernel is not None:
            tile = f", tile {self.tile[0]} x {self.tile[1]}" if self.tile else ""
            lines.append(f"kernel:  {self.kernel}{tile}, {self._division()}")
        lines += [f"copy:    {copy}" for copy in self.copies]
        lines += [f"pass:    {made}" for made in self.passes]
        lines += [f"not {name}: {'; '.join(reasons)}" for name, reasons in self.rejected.items()]
        return "\n".join(lines)

    def _division(self) -> str:
        text = f"splits: {self.num_splits}"
        if self.num_splits > 1 and self.num_whole_tiles:
            split_tiles = self.num_row_tiles - self.num_whole_tiles
            text += f" (the last {split_tiles} of {self.num_row_tiles} row tiles alone)"
        if self.packed_heads > 1:
            text += f", {self.packed_heads} query heads packed in a row tile"
        return text


def explain_request(request: PrefillRequest, device: DeviceInfo | None = None) -> Explanation:
    """`explain` for a checked call, on the tensors' device or as if they were on `device`."""
    if device is None:
        device = support.device_info(request.q.device)
    rejected = {}
    for backend in PRIORITY:
        reasons = backend.unsupported_reasons(request, device)
        if reasons:
            rejected[backend.name] = tuple(reasons)
    if request.backend in rejected:
        text = refusal(request, device, list(rejected[request.backend]))
        return Explanation(None, text, rejected, str(device), None, None, 0, ())

    name = resolve(request, device)
    reason = _reason(name, request)
    if request.qo_len == 0 or request.num_qo_heads == 0 or request.kv_len == 0:
        reason += "; an empty call, nothing is launched"
        return Explanation(name, reason, rejected, str(device), None, None, 0, ())
    if name == "reference":
        return Explanation(name, reason, rejected, str(device), None, None, 1, ())
    dtype = kernel_dtype.of(name, request)
    kernel = _kernel(name, dtype, request)
    plan = split_plan(name, request, device.num_sms)
    return Explanation(
        name,
        reason,
        rejected,
        str(device),
        kernel.name,
        (kernel.tile_m, kernel.tile_n),
        plan.num_splits,
        _copies(request),
        _passes(dtype, request),
        plan.packed_heads,
        plan.num_row_tiles,
        plan.num_whole_tiles,
        kernel.dtype,
    )


def _reason(name: str, request: PrefillRequest) -> str:
    if request.backend != "auto":
        return "named by the caller"
    order = [backend.name for backend in PRIORITY]
    passed_over = order[: order.index(name)]
    if not passed_over:
        return "auto: first in priority, and nothing speaks against it"
    return f"auto: first in priority that can; {' and '.join(passed_over)} cannot"


def _kernel(name: str, dtype: torch.dtype, request: PrefillRequest) -> Kernel:
    build = support.native().build
    assert build is not None, "resolve() names a native backend only where the library is loaded"
    kernel = support.find_kernel(
        build,
        name,
        support.dtype_name(dtype),
        request.head_dim_qk,
        request.head_dim_vo,
    )
    assert kernel is not None, "resolve() names a native backend only where it has a kernel"
    return kernel


def _copies(request: PrefillRequest) -> tuple[str, ...]:
    tensors = {"q": request.q, "k": request.k, "v": request.v, "out": request.out}
    reasons = {name: ops.copy_reason(t) for name, t in tensors.items() if t is not None}
    masks = {
        "custom_mask": request.custom_mask,
        "packed_custom_mask": request.packed_custom_mask,
    }
    reasons |= {name: ops.mask_copy_reason(m) for name, m in masks.items() if m is not None}
    return tuple(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def _passes(dtype: torch.dtype, request: PrefillRequest) -> tuple[str, ...]:
    """What is made of q, k and v for a kernel of `dtype`, and the merging of parts of the output.

    `csrc/common/prepare.h` rotates and widens. 8-bit products want the keys of v side by side.
    """
    rotated = "qk" if request.pos_encoding_mode == "ROPE_LLAMA" else ""
    q_dtype, o_dtype = request.q.dtype, request.o_dtype
    is_widened = q_dtype != dtype
    passes = []
    for name, tensor in (("q", request.q), ("k", request.k), ("v", request.v)):
        steps = []
        if tensor.dtype != dtype:
            steps.append(
                f"widened from {support.dtype_name(tensor.dtype)} to {support.dtype_name(dtype)}"
            )
        if name in rotated:
            steps.append(f"rotated in {support.dtype_name(q_dtype)}" if is_widened else "rotated")
        if name == "v" and dtype in FP8_DTYPES:
            steps.append("transposed")
        if steps:
            passes.append(f"{name}: {' and '.join(steps)}")
    if o_dtype != kernel_dtype.written_by(dtype):
        passes.append(f"out: {support.dtype_name(o_dtype)} by way of parts in float32")
    return tuple(passes)
