"""`python -m prefill check`: whether this installation computes right on this device.

The reference backend is held against `plain_attention`; then each kernel that the device can run
(backend, dtype, head-dim class) against the reference, over calls that use each feature once. One
line a group; seconds in all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prefill import support
from prefill.api import explain, single_prefill_with_kv_cache_return_lse
from prefill.backends import PRIORITY
from prefill.devices import device_here
from prefill.explain import Explanation
from prefill.packing import packbits
from prefill.plain import plain_attention
from prefill.progress import Progress
from prefill.request import FP8_DTYPES, HALF_DTYPES
from prefill.rope import alibi_slopes

KERNEL_LENGTHS = (150, 333)  # (qo_len, kv_len): no multiple of a tile, several tiles of keys
REFERENCE_LENGTHS = (33, 70)
NUM_QO_HEADS, NUM_KV_HEADS = 6, 2
REFERENCE_HEAD_DIMS = ((64, 64), (192, 128))
LSE_TOLERANCE = 1e-3
"""Base-2 LSE of float32 logits below 2^10; one key too many among 333 moves it by 4e-3."""


@dataclass(frozen=True)
class Call:
    """What is asked of a backend, and in the words of `plain_attention`."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    """k and v are NHD; `arguments` may say that they are passed otherwise."""
    arguments: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] | None = None
    """None: as `arguments`."""

    def run(self, backend: str, v: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
        return single_prefill_with_kv_cache_return_lse(
            *self.passed(v), backend=backend, **(self.arguments | arguments)
        )

    def passed(self, v: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        v = self.v if v is None else v
        if self.arguments.get("kv_layout") == "HND":
            return self.q, self.k.transpose(0, 1), v.transpose(0, 1)
        return self.q, self.k, v


@dataclass(frozen=True)
class Verdict:
    """What came of one group of calls."""

    calls: int
    largest: float
    """The largest error over what is allowed; above 1 is wrong."""
    wrong: tuple[str, ...]
    """Of each wrong call: its name and by how much."""
    refused: tuple[str, ...]
    """Calls that the backend does not take, with its reason."""


def run(device_name: str | None = None) -> int:
    """Print a line for each group; 0 if all that could be checked is right, else 1.

    2 where this machine has no such device.
    """
    try:
        device = device_here(device_name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    info = support.device_info(device)
    print(f"checking on {info}")
    passed = True
    kernels = {name: [] if _missing(name, info) else [*_kernels(name)] for name in _native_names()}
    groups = len(HALF_DTYPES) * len(REFERENCE_HEAD_DIMS) + sum(map(len, kernels.values()))
    progress = Progress(groups)
    for dtype in HALF_DTYPES:
        for dims in REFERENCE_HEAD_DIMS:
            group = f"reference {_group(dtype, dims)}"
            progress.step(group)
            verdict = _judge(
                calls(dtype, dims, REFERENCE_LENGTHS, device), "reference", _against_plain
            )
            passed = _report(group, verdict, progress) and passed
    unchecked = []
    for name, rows in kernels.items():
        for dtype, dims in rows:
            group = f"{name} {_group(dtype, dims)}"
            progress.step(group)
            verdict = _judge(calls(dtype, dims, KERNEL_LENGTHS, device), name, _against_reference)
            if verdict.calls:
                passed = _report(group, verdict, progress) and passed
            else:
                unchecked.append((group, verdict.refused[0]))
        if reason := _missing(name, info):
            unchecked.append((name, reason))
    progress.done()
    for group, reason in unchecked:
        print(f"{group} NOT CHECKED: {reason}")
    if not passed:
        print("SOMETHING IS WRONG: see above")
        return 1
    rest = f"; not checked: {', '.join(group for group, _ in unchecked)}" if unchecked else ""
    print(f"all that was checked is right{rest}")
    return 0


def _native_names() -> list[str]:
    return [backend.name for backend in PRIORITY if backend.name != "reference"]


def _missing(backend: str, device: support.DeviceInfo) -> str:
    """Why nothing of the backend runs on the device; "" if something does."""
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is the {device.type}"
    return support.backend_reason(support.native(), backend, device.capability)


def _group(dtype: torch.dtype, head_dims: tuple[int, int]) -> str:
    return f"{support.dtype_name(dtype)} {head_dims[0]}x{head_dims[1]}"


def _kernels(backend: str) -> Iterator[tuple[torch.dtype, tuple[int, int]]]:
    """The dtypes of queries and head-dim classes that the build has of the backend."""
    build = support.native().build
    for kernel in build.kernels_of(backend) if build is not None else ():
        yield getattr(torch, kernel.dtype), (kernel.head_dim_qk, kernel.head_dim_vo)


def _report(group: str, verdict: Verdict, progress: Progress) -> bool:
    text = f"{verdict.calls} calls, largest error {verdict.largest:.2f} of what is allowed"
    progress.say(f"{group}: {'WRONG' if verdict.wrong else 'ok'} ({text})")
    for line in verdict.wrong:
        print(f"  wrong: {line}")
    for line in verdict.refused:
        print(f"  not taken: {line}")
    return not verdict.wrong


def _judge(calls: list[Call], backend: str, error: Callable[[Call, Explanation], float]) -> Verdict:
    largest, wrong, refused = 0.0, [], []
    for call in calls:
        told = explain(*call.passed(), backend=backend, **call.arguments)
        if told.backend is None:
            refused.append(f"{call.name}: {'; '.join(told.rejected[backend])}")
            continue
        try:
            size = error(call, told)
        except RuntimeError as failure:  # CUDA's own: what an unfit driver or device says
            wrong.append(f"{call.name}: {failure}")
            continue
        largest = max(largest, size)
        if size > 1.0:
            wrong.append(f"{call.name}: {size:.3g} times the allowed error")
    return Verdict(len(calls) - len(refused), largest, tuple(wrong), tuple(refused))


def _against_plain(call: Call, told: Explanation) -> float:
    """The reference's float32 results differ from the plain ones by one rounding."""
    out, lse = call.run("reference", o_dtype=torch.float32)
    arguments = call.arguments if call.plain is None else call.plain
    right, right_lse = plain_attention(call.q, call.k, call.v, **arguments)
    size, _ = plain_attention(call.q, call.k, _absolute(call.v), **arguments)
    allowed = 2.0**-22 * size + _turned(call) * size
    return max(
        _ratio(out, right, allowed),
        _ratio(lse, right_lse, 2.0**-22 * (1 + right_lse.abs()) + _turned(call)),
    )


def _against_reference(call: Call, told: Explanation) -> float:
    """The kernel's results differ from the reference's by what its arithmetic costs at worst.

    Weights and output round, half a unit each of `sum_j p_j |v_j|` and of the output; float32
    logits below 2^6 cost 2^-14 of that sum; float16 weights below 2^-14 lose 2^-25 each. A kernel
    that multiplies in float8 rounds weights to e4m3fn, of which those below 2^-14 of a row's
    largest lose 2^-18 of it each; its sums over the keys of a tile lose up to 2^-8. The second
    call must give the same bits.
    """
    assert told.backend is not None
    assert told.dtype is not None
    out, lse = call.run(told.backend)
    again, lse_again = call.run(told.backend)
    if not (torch.equal(out, again) and torch.equal(lse, lse_again)):
        return math.inf
    right, right_lse = call.run("reference", o_dtype=torch.float32)
    size, _ = call.run("reference", v=_absolute(call.v), o_dtype=torch.float32)
    dtype: torch.dtype = getattr(torch, told.dtype)
    is_float8 = dtype in FP8_DTYPES
    weights = torch.float8_e4m3fn if is_float8 else dtype
    half_unit, out_half_unit = (torch.finfo(each).eps / 2 for each in (weights, out.dtype))
    allowed = 1.01 * (half_unit * size + out_half_unit * right.abs())
    allowed = allowed + (2.0**-14 + _turned(call)) * size
    value_sum = call.k.shape[0] * _absolute(call.v).float().amax()
    if dtype == torch.float16:
        allowed = allowed + 2.0**-25 * (1 + value_sum)
    lse_allowed = torch.full_like(right_lse, LSE_TOLERANCE + _turned(call))
    if is_float8:
        cut = _cut(call)
        allowed = allowed + (2.0**-8 + 2.2 * cut) * size + 2.0**-18 * value_sum
        lse_allowed = lse_allowed + 1.5 * cut  # log2(e), and a little
    # Rows without keys are exactly zero.
    allowed = allowed.masked_fill((right_lse == -math.inf)[..., None], 0.0)
    return max(_ratio(out, right, allowed), _ratio(lse, right_lse, lse_allowed))


def _turned(call: Call) -> float:
    """How far logits may move where q and k are rotated.

    A rotated element near the middle of two neighbours may become the other one: by two half units
    of some few of the head's elements, in q and in k.
    """
    rotates = call.arguments.get("pos_encoding_mode") == "ROPE_LLAMA"
    return 4 * torch.finfo(call.q.dtype).eps / 2 if rotates else 0.0


def _cut(call: Call) -> float:
    """How far logits may be off whose products are summed as 8-bit tensor cores do.

    They keep 13 bits of the sum that they have come to, 8 products at a time (docs/fp8.md). For
    numbers of either sign that is less than 2^-11 of |q| |k|.
    """
    q, k = (x.float().norm(dim=-1).amax().item() for x in (call.q, call.k))
    cut: float = 2.0**-11 * q * k / math.sqrt(call.q.shape[2])
    for name in ("scale_q", "scale_k"):
        if name in call.arguments:
            cut *= call.arguments[name].abs().amax().item()
    return cut


def _ratio(value: Tensor, right: Tensor, allowed: Tensor) -> float:
    """The largest error over what is allowed; equal values, infinities too, are no error."""
    error = (value.double() - right.double()).abs() / allowed.double()
    error = error.masked_fill(value.double() == right.double(), 0.0)
    return error.nan_to_num(nan=math.inf).amax().item()


def _absolute(v: Tensor) -> Tensor:
    return v.float().abs().to(v.dtype)


def calls(
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    lengths: tuple[int, int],
    device: torch.device,
) -> list[Call]:
    """Each feature once, the same values every time."""
    qo_len, kv_len = lengths
    generator = torch.Generator().manual_seed(0)

    def normal(length: int, heads: int, head_dim: int) -> Tensor:
        values = torch.randn(length, heads, head_dim, generator=generator)
        return values.to(device, dtype)

    def per_head(heads: int, low: float, high: float) -> Tensor:
        return torch.linspace(low, high, heads, device=device)

    q = normal(qo_len, NUM_QO_HEADS, head_dims[0])
    k = normal(kv_len, NUM_KV_HEADS, head_dims[0])
    v = normal(kv_len, NUM_KV_HEADS, head_dims[1])
    mask = torch.rand(qo_len, kv_len, generator=generator).to(device) < 0.5
    mask[::5] = False
    packed = packbits(mask, bitorder="little")
    slopes = alibi_slopes(NUM_QO_HEADS, device)
    scales = {
        "scale_q": per_head(NUM_QO_HEADS, 0.5, -1.5),
        "scale_k": per_head(NUM_KV_HEADS, 0.5, 1.25),
        "scale_v": per_head(NUM_KV_HEADS, 0.5, 2.0),
    }
    k_hnd, v_hnd = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    wide = torch.cat((v, k), -1)[..., : head_dims[1]]
    fp8_q, fp8_k, fp8_v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    written = torch.float16 if dtype in FP8_DTYPES else dtype
    causal = {"causal": True}
    return [
        Call("full", q, k, v),
        Call("causal", q, k, v, causal),
        Call("causal, more rows than keys", q, k[: qo_len // 2], v[: qo_len // 2], causal),
        Call("one row", q[:1], k, v, causal),
        Call("window", q, k, v, causal | {"window_left": 37}),
        Call("bool mask", q, k, v, {"custom_mask": mask}),
        Call("packed mask", q, k, v, {"packed_custom_mask": packed}, {"custom_mask": mask}),
        Call("soft cap", q, k, v, causal | {"logits_soft_cap": 2.0}),
        Call("ALiBi", q, k, v, {"pos_encoding_mode": "ALIBI"}, {"alibi_slopes": slopes}),
        Call("RoPE", q, k, v, {"pos_encoding_mode": "ROPE_LLAMA"}, {"rotated": True}),
        Call("sinks", q, k, v, causal | {"sinks": per_head(NUM_QO_HEADS, -1.0, 4.0)}),
        Call("scales per head", q, k, v, scales),
        Call("HND", q, k_hnd, v_hnd, {"kv_layout": "HND"}, {}),
        Call("values in a wider tensor", q, k, wide),
        Call("float8 keys and values", q, fp8_k, fp8_v),
        Call("all float8", fp8_q, fp8_k, fp8_v, {"o_dtype": written}, {}),
        Call("float32 output", q, k, v, {"o_dtype": torch.float32}, {}),
    ]
