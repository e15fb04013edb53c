"""Runs a resolved request: the native op with kernel-ready tensors, or the reference.

Kernels read q, k, v and write out through any outer strides, but want the last dimension dense,
rows at multiples of 8 elements and 16-byte aligned bases. float8 tensors and float32 outputs follow
the same rule: the passes that widen and merge take 8 elements, or 4, at a time. Masks, bool or
packed, are read at any address and with any row stride, but want a dense last dimension too. What
is not so is copied here, and `explain` says so.

Two ops, one signature. `prefill::attention` is the library's. `prefill::prepared_attention` is
Python's: it prepares the tensors, then calls the former. Eager calls run that function directly; a
compiled graph holds it as an op, because the alignment of a tensor is known only when the graph
runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from prefill import flops, support
from prefill.reference import reference_attention
from prefill.request import PrefillRequest

_SIGNATURE = (
    "(str backend, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? scale_q, "
    "Tensor? scale_k, Tensor? scale_v, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, int "
    "window_left, int window_right, bool alibi, bool rope, float rope_scale, float rope_theta, "
    "float soft_cap, float sm_scale, float v_scale, float lse_scale, int num_splits) -> ()"
)
_LN_2 = math.log(2.0)
_LOG2_E = 1.0 / _LN_2

_attention: Any = None
_prepared_attention: Any = None
_registrations: list[torch.library.Library] = []  # a registration lives as long as its Library


def _fake_attention(*args: object) -> None:
    """What tracing sees: `out` and `lse` are written in place, nothing is returned."""


def register() -> None:
    """Give the library's op a fake kernel and define the op that compiled graphs hold.

    Torch's flop counter is told of both.
    """
    global _attention, _prepared_attention
    library: Any = torch.library.Library("prefill", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("prepared_attention" + _SIGNATURE)
    library.impl("prepared_attention", prepare_and_launch, "CompositeExplicitAutograd")
    torch.library.register_fake("prefill::attention", _fake_attention, lib=library)
    torch.library.register_fake("prefill::prepared_attention", _fake_attention, lib=library)
    _registrations.append(library)
    _attention = torch.ops.prefill.attention.default
    _prepared_attention = torch.ops.prefill.prepared_attention.default
    flops.register()


def run(
    backend: str, request: PrefillRequest, *, num_splits: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Compute the request on that backend; (out, lse), lse None unless asked for.

    `num_splits` is for tests: into how many parts, 1 to 256, a kernel must split the keys; 0
    leaves that to the library's rule. The reference has no parts to split into.
    """
    if backend == "reference":
        return reference_attention(request)
    q = request.q
    qo_len, kv_len, heads = request.qo_len, request.kv_len, request.num_qo_heads
    out = request.out
    if out is None:
        out = torch.empty(
            (qo_len, heads, request.head_dim_vo), dtype=request.o_dtype, device=q.device
        )
    lse = request.lse
    if lse is None and request.return_lse:
        lse = torch.empty((qo_len, heads), dtype=torch.float32, device=q.device)

    if qo_len == 0 or heads == 0:
        return out, lse
    if kv_len == 0:
        out.zero_()
        if lse is not None:
            if request.sinks is None:
                lse.fill_(-math.inf)
            else:
                lse.copy_(request.sinks * (_LOG2_E if request.lse_base == "2" else 1.0))
        return out, lse

    window_left, window_right = bounds(request)
    launch = prepare_and_launch if has_address(q) else _prepared_attention
    launch(
        backend,
        q,
        request.k,
        request.v,
        out,
        lse,
        request.scale_q,
        request.scale_k,
        request.scale_v,
        request.custom_mask if request.packed_custom_mask is None else request.packed_custom_mask,
        request.alibi_slopes,
        request.sinks,
        window_left,
        window_right,
        request.pos_encoding_mode == "ALIBI",
        request.pos_encoding_mode == "ROPE_LLAMA",
        request.rope_scale,
        request.rope_theta,
        request.logits_soft_cap,
        request.sm_scale,
        request.v_scale,
        1.0 if request.lse_base == "2" else _LN_2,
        num_splits,
    )
    return out, lse


def bounds(request: PrefillRequest) -> tuple[int, int]:
    """(window_left, window_right) as the library takes them; -1 where there is no such bound."""
    window_left = request.window_left
    if window_left >= request.kv_len - 1:  # reaches the first key from the last row: bounds nothing
        window_left = -1
    return window_left, 0 if request.causal else -1


def prepare_and_launch(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale_q: Tensor | None,
    scale_k: Tensor | None,
    scale_v: Tensor | None,
    mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    window_left: int,
    window_right: int,
    alibi: bool,
    rope: bool,
    rope_scale: float,
    rope_theta: float,
    soft_cap: float,
    sm_scale: float,
    v_scale: float,
    lse_scale: float,
    num_splits: int,
) -> None:
    """Call `prefill::attention`, with copies of the tensors that kernels cannot address.

    `mask` is bool [qo_len, kv_len], or uint8 [ceil(qo_len * kv_len / 8)].
    """
    if not is_kernel_ready(q):
        q = q.clone(memory_format=torch.contiguous_format)
    if not is_kernel_ready(k):
        k = k.clone(memory_format=torch.contiguous_format)
    if not is_kernel_ready(v):
        v = v.clone(memory_format=torch.contiguous_format)
    if mask is not None and mask_copy_reason(mask):
        mask = mask.contiguous()
    ready = is_kernel_ready(out)
    target = out if ready else torch.empty_like(out, memory_format=torch.contiguous_format)
    _attention(
        backend,
        q,
        k,
        v,
        target,
        lse,
        scale_q,
        scale_k,
        scale_v,
        mask,
        alibi_slopes,
        sinks,
        window_left,
        window_right,
        alibi,
        rope,
        rope_scale,
        rope_theta,
        soft_cap,
        sm_scale,
        v_scale,
        lse_scale,
        num_splits,
    )
    if not ready:
        out.copy_(target)


def has_address(tensor: Tensor) -> bool:
    """Whether the tensor's memory can be asked after.

    A subclass has none of its own (FakeTensor), or wants to see the op (functorch, tracing).
    """
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def is_kernel_ready(tensor: Tensor) -> bool:
    """Whether [length, heads, head_dim] can be read where it lies, in 8 bits or 16."""
    return tensor.data_ptr() % 16 == 0 and has_kernel_strides(tensor)


def has_kernel_strides(tensor: Tensor) -> bool:
    """The same but for the address."""
    if tensor.is_contiguous():  # head dims are multiples of 8
        return True
    length, heads, _ = tensor.shape
    outer, middle, inner = tensor.stride()
    return inner == 1 and not (outer % 8 and length != 1) and not (middle % 8 and heads != 1)


def mask_copy_reason(mask: Tensor) -> str:
    """Why a mask, bool or packed, is copied, for `explain`; "" if it is read where it lies."""
    if mask.stride(-1) == 1 or mask.shape[-1] == 1:
        return ""
    return f"its last dimension has stride {mask.stride(-1)}, not 1"


def copy_reason(tensor: Tensor) -> str:
    """Why `is_kernel_ready` says no, for `explain`; "" if it says yes."""
    if is_kernel_ready(tensor):
        return ""
    length, heads, _ = tensor.shape
    outer, middle, inner = tensor.stride()
    if inner != 1:
        return f"the last dimension has stride {inner}, not 1"
    if (outer % 8 and length != 1) or (middle % 8 and heads != 1):
        return f"strides {(outer, middle)} are not multiples of 8 elements"
    return "its address is not a multiple of 16 bytes"


if support.native().build is not None:
    register()
