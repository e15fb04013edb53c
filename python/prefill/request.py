"""One attention call, validated and normalised.

`PrefillRequest` is the only form in which a call travels on from here: every backend, the resolver
and `explain` read it and nothing else. Values in it are already checked, defaults are filled in,
and arguments that mean the same thing have one spelling.
"""

from __future__ import annotations

import math
import warnings
from operator import index
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from prefill import errors

KV_LAYOUTS = ("NHD", "HND")
POS_ENCODING_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
BACKENDS = ("auto", "fa2", "fa3", "reference")
MAX_HEAD_DIM = 256
HALF_DTYPES = (torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class PrefillRequest(NamedTuple):
    """A checked call, immutable. (A frozen dataclass of this size takes 4 us longer to make.)

    Shapes use `Hq = num_qo_heads`, `Hk = num_kv_heads`; `off = kv_len - qo_len`.

    The sum that a backend computes, with `hk = h // (Hq // Hk)` and `pos(i) = i + off`:

    ```
    logit = sm_scale * scale_q[h] * scale_k[hk] * (q'_i . k'_j)     (a scale that is None counts 1)
    logit = logits_soft_cap * tanh(logit / logits_soft_cap)         (if logits_soft_cap > 0)
    logit = logit + slope[h] * (j - pos(i))                         (if "ALIBI")
    seen  = mask bit (i, j), if there is a mask, and j <= pos(i), if causal,
            and j >= pos(i) - window_left, if window_left >= 0
    out   = softmax of logit over the seen j (and the sink), times v_j * scale_v[hk] * v_scale
    lse   = log of the softmax denominator, in base `lse_base`
    ```
    """

    q: Tensor
    """[qo_len, Hq, head_dim_qk], as given."""
    k: Tensor
    """[kv_len, Hk, head_dim_qk]: always NHD-shaped; for kv_layout "HND" a transposed view of what
    was given.
    """
    v: Tensor
    """[kv_len, Hk, head_dim_vo]: as `k`."""

    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int

    scale_q: Tensor | None
    """float32 [Hq] on q's device, perhaps with stride 0, or None. Floats are folded into `sm_scale`
    instead.
    """
    scale_k: Tensor | None
    """float32 [Hk] as `scale_q`; a `k_scale` that was given as a tensor is folded in here, on the
    device.
    """
    scale_v: Tensor | None
    """float32 [Hk] as `scale_q`; a `v_scale` that was given as a tensor is folded in here, on the
    device.
    """
    sm_scale: float
    """The softmax scale times every scale of q and k that was given as a float. Any value: 0 and
    negative too.
    """
    v_scale: float
    """The product of `scale_v` and `v_scale` as far as they were given as floats, else 1."""

    o_dtype: torch.dtype
    """dtype of the output; q's, or bfloat16 for fp8 q, where the caller did not say."""

    custom_mask: Tensor | None
    """bool [qo_len, kv_len], True = keep, any strides; None if absent or if `packed_custom_mask` is
    there.
    """
    packed_custom_mask: Tensor | None
    """uint8 [ceil(qo_len * kv_len / 8)], bit `i * kv_len + j`, little-endian; bits past the end
    mean nothing.
    """
    causal: bool
    """`j <= pos(i)`. Already False where a mask is given."""
    window_left: int
    """-1 = off, else `j >= pos(i) - window_left`. May be larger than the sequence."""

    logits_soft_cap: float
    """0.0 = off, else > 0."""
    pos_encoding_mode: Literal["NONE", "ROPE_LLAMA", "ALIBI"]
    rope_scale: float
    """Positions are divided by it. 1.0 unless given; means something with "ROPE_LLAMA" only."""
    rope_theta: float
    """1e4 unless given; means something with "ROPE_LLAMA" only."""
    alibi_slopes: Tensor | None
    """float32 [Hq] given by the caller, or None: the paper's rule. Only with "ALIBI"."""
    sinks: Tensor | None
    """float32 [Hq]: a logit (natural units) per head that joins the denominator and has no value,
    or None.
    """
    use_fp16_qk_reduction: bool
    """The QK product may accumulate in fp16 (saturating); the exact fp32 result is always
    allowed.
    """

    return_lse: bool
    lse_base: Literal["2", "e"]

    out: Tensor | None
    """[qo_len, Hq, head_dim_vo] of o_dtype, any strides: where given, the result goes here."""
    lse: Tensor | None
    """float32 [qo_len, Hq], any strides: likewise for the LSE. Only with `return_lse`."""

    kv_layout: Literal["NHD", "HND"]
    """As given. `k` and `v` are NHD-shaped whatever this says."""
    backend: Literal["auto", "fa2", "fa3", "reference"]
    """As given."""


def make_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | float | None = None,
    scale_k: Tensor | float | None = None,
    scale_v: Tensor | float | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: str | int = "2",
) -> PrefillRequest:
    """Check every argument and return the call as a `PrefillRequest`, or raise what `errors` words.

    This runs on every call, so the good path is comparisons alone; texts are made where something
    is wrong.
    """
    # Kinds and unknown words.
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise errors.not_a_tensor(("q", q), ("k", k), ("v", v))
    if not (q.layout is k.layout is v.layout is torch.strided):
        raise errors.not_strided(("q", q), ("k", k), ("v", v))
    _check_memory("q", q)
    _check_memory("k", k)
    _check_memory("v", v)
    # isinstance first: an array compares element by element and has no truth.
    if not isinstance(kv_layout, str) or kv_layout not in KV_LAYOUTS:
        raise errors.unknown_word("kv_layout", kv_layout, KV_LAYOUTS)
    if not isinstance(pos_encoding_mode, str) or pos_encoding_mode not in POS_ENCODING_MODES:
        raise errors.unknown_word("pos_encoding_mode", pos_encoding_mode, POS_ENCODING_MODES)
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise errors.unknown_word("backend", backend, BACKENDS)
    if not isinstance(lse_base, str) or lse_base not in ("2", "e"):
        if type(lse_base) is not int or lse_base != 2:
            raise errors.bad_lse_base(lse_base)
        lse_base = "2"
    if causal is not True and causal is not False:
        raise errors.not_a_bool("causal", causal)
    if return_lse is not True and return_lse is not False:
        raise errors.not_a_bool("return_lse", return_lse)
    if use_fp16_qk_reduction is not True and use_fp16_qk_reduction is not False:
        raise errors.not_a_bool("use_fp16_qk_reduction", use_fp16_qk_reduction)

    # Shapes. k and v are seen NHD-shaped from here on.
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise errors.not_three_dims(q, k, v, kv_layout)
    if kv_layout == "HND":
        k = k.transpose(0, 1)
        v = v.transpose(0, 1)
    qo_len, num_qo_heads, head_dim_qk = q.shape
    kv_len, num_kv_heads, k_head_dim = k.shape
    v_len, v_heads, head_dim_vo = v.shape
    if k_head_dim != head_dim_qk or v_len != kv_len or v_heads != num_kv_heads:
        raise errors.shapes_disagree(q, k, v, kv_layout)
    if head_dim_qk % 8 or not 0 < head_dim_qk <= MAX_HEAD_DIM:
        raise errors.bad_head_dim("head_dim_qk", head_dim_qk, "q and k")
    if head_dim_vo % 8 or not 0 < head_dim_vo <= MAX_HEAD_DIM:
        raise errors.bad_head_dim("head_dim_vo", head_dim_vo, "v")
    # Kernels depend on them, so a compiled graph takes them as constants, dynamic shapes or not.
    head_dim_qk = index(head_dim_qk)
    head_dim_vo = index(head_dim_vo)
    if num_qo_heads % num_kv_heads if num_kv_heads else num_qo_heads:
        raise errors.bad_group(q, k, v, kv_layout)

    # Devices, dtypes, gradients.
    device = q.device
    if k.device != device or v.device != device:
        raise errors.wrong_device(("k", k), ("v", v), device=device)
    q_dtype = q.dtype
    if not (q_dtype in HALF_DTYPES and k.dtype == q_dtype and v.dtype == q_dtype):
        _check_mixed_dtypes(q_dtype, k.dtype, v.dtype)
    if o_dtype is None:
        o_dtype = torch.bfloat16 if q_dtype in FP8_DTYPES else q_dtype
    elif not isinstance(o_dtype, torch.dtype) or o_dtype not in OUTPUT_DTYPES:
        raise errors.bad_output_dtype(o_dtype, OUTPUT_DTYPES)
    if use_fp16_qk_reduction and not (q_dtype == torch.float16 and k.dtype == torch.float16):
        raise errors.fp16_reduction_dtype(q_dtype, k.dtype)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise errors.forward_only("q, k or v")

    # Which keys are seen.
    if type(window_left) is not int:
        window_left = _as_int("window_left", window_left)
    if window_left < 0:
        window_left = -1
    if packed_custom_mask is not None:
        _check_packed_mask(packed_custom_mask, qo_len, kv_len, device)
        custom_mask = None
    elif custom_mask is not None:
        _check_mask(custom_mask, qo_len, kv_len, device)
    if causal and (custom_mask is not None or packed_custom_mask is not None):
        if not torch.compiler.is_compiling():
            _warn_causal_with_mask()
        causal = False

    # Logits.
    sm_scale = 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else _as_float("sm_scale", sm_scale)
    soft_cap = 0.0 if logits_soft_cap is None else _as_soft_cap(logits_soft_cap)
    if pos_encoding_mode != "ROPE_LLAMA" and (rope_scale is not None or rope_theta is not None):
        raise errors.no_effect("rope_scale and rope_theta", "ROPE_LLAMA", pos_encoding_mode)
    rope_scale = 1.0 if rope_scale is None else _as_positive("rope_scale", rope_scale)
    rope_theta = 1e4 if rope_theta is None else _as_positive("rope_theta", rope_theta)
    if alibi_slopes is not None:
        if pos_encoding_mode != "ALIBI":
            raise errors.no_effect("alibi_slopes", "ALIBI", pos_encoding_mode)
        _check_per_head("alibi_slopes", alibi_slopes, num_qo_heads, "num_qo_heads", device)
    if sinks is not None:
        _check_per_head("sinks", sinks, num_qo_heads, "num_qo_heads", device)

    # Scales: floats join sm_scale or the float v_scale, tensors stay tensors.
    v_factor = 1.0
    if scale_q is not None:
        if isinstance(scale_q, Tensor):
            scale_q = _per_head_scale("scale_q", scale_q, num_qo_heads, "num_qo_heads", device)
        else:
            sm_scale *= _as_float("scale_q", scale_q)
            scale_q = None
    if scale_k is not None:
        if isinstance(scale_k, Tensor):
            scale_k = _per_head_scale("scale_k", scale_k, num_kv_heads, "num_kv_heads", device)
        else:
            sm_scale *= _as_float("scale_k", scale_k)
            scale_k = None
    if scale_v is not None:
        if isinstance(scale_v, Tensor):
            scale_v = _per_head_scale("scale_v", scale_v, num_kv_heads, "num_kv_heads", device)
        else:
            v_factor = _as_float("scale_v", scale_v)
            scale_v = None
    if k_scale is not None:
        if isinstance(k_scale, Tensor):
            scale_k = _times_scalar("k_scale", k_scale, scale_k, num_kv_heads, device)
        else:
            sm_scale *= _as_float("k_scale", k_scale)
    if v_scale is not None:
        if isinstance(v_scale, Tensor):
            scale_v = _times_scalar("v_scale", v_scale, scale_v, num_kv_heads, device)
        else:
            v_factor *= _as_float("v_scale", v_scale)

    # Results.
    if out is not None:
        _check_result("out", out, (qo_len, num_qo_heads, head_dim_vo), o_dtype, device)
    if lse is not None:
        if not return_lse:
            raise errors.lse_without_return()
        _check_result("lse", lse, (qo_len, num_qo_heads), torch.float32, device)

    return PrefillRequest(
        q,
        k,
        v,
        qo_len,
        kv_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo,
        scale_q,
        scale_k,
        scale_v,
        sm_scale,
        v_factor,
        o_dtype,
        custom_mask,
        packed_custom_mask,
        causal,
        window_left,
        soft_cap,
        pos_encoding_mode,  # type: ignore[arg-type]  # checked above; mypy does not narrow by `in`
        rope_scale,
        rope_theta,
        alibi_slopes,
        sinks,
        use_fp16_qk_reduction,
        return_lse,
        lse_base,  # type: ignore[arg-type]
        out,
        lse,
        kv_layout,  # type: ignore[arg-type]
        backend,  # type: ignore[arg-type]
    )


def _check_memory(name: str, tensor: Tensor) -> None:
    """The storage may have been freed or cut under a tensor, as sharded training does it.

    Kernels would read there. Subclasses, and what a compiler traces, have no memory to look at.
    """
    if type(tensor) is not Tensor or torch.compiler.is_compiling():
        return
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count += (size - 1) * stride
    needed = int(tensor.storage_offset() + count) * tensor.element_size() if count else 0
    if needed > tensor.untyped_storage().nbytes():
        raise errors.memory_is_gone(name, tensor, needed)


def _check_mixed_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> None:
    fp8_kv = k in FP8_DTYPES and v in FP8_DTYPES
    if not (fp8_kv and (q in HALF_DTYPES or q in FP8_DTYPES)):
        all_foreign = {q, k, v}.isdisjoint((*HALF_DTYPES, *FP8_DTYPES))
        raise errors.bad_dtypes(q, k, v, all_foreign=all_foreign)


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__float__"):
        raise errors.not_a_float(name, value)
    if getattr(value, "ndim", 0):  # an array of one element would pass, with a warning
        raise errors.not_a_float(name, value)
    try:
        return float(value)
    except OverflowError:
        raise errors.float_too_large(name, value) from None


def _as_positive(name: str, value: Any) -> float:
    number = _as_float(name, value)
    if not 0.0 < number < math.inf:
        raise errors.not_positive(name, number)
    return number


def _as_soft_cap(value: Any) -> float:
    cap = _as_float("logits_soft_cap", value)
    if cap <= 0.0:
        return 0.0
    if not cap < math.inf:
        raise errors.bad_soft_cap(cap)
    return cap


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise errors.not_an_int(name, value)
    return value.__index__()  # type: ignore[no-any-return]


def _check_mask(mask: Any, qo_len: int, kv_len: int, device: torch.device) -> None:
    if not isinstance(mask, Tensor):
        raise errors.not_a_tensor(("custom_mask", mask))
    if mask.dtype != torch.bool:
        raise errors.mask_not_bool(mask)
    if mask.dim() != 2 or mask.shape[0] != qo_len or mask.shape[1] != kv_len:
        raise errors.bad_mask_shape(mask, qo_len, kv_len)
    if mask.device != device:
        raise errors.wrong_device(("custom_mask", mask), device=device)
    _check_memory("custom_mask", mask)


def _check_packed_mask(mask: Any, qo_len: int, kv_len: int, device: torch.device) -> None:
    if not isinstance(mask, Tensor):
        raise errors.not_a_tensor(("packed_custom_mask", mask))
    if mask.dtype != torch.uint8:
        raise errors.packed_mask_not_uint8(mask)
    if mask.dim() != 1 or mask.shape[0] != (qo_len * kv_len + 7) // 8:
        raise errors.bad_packed_mask_shape(mask, qo_len, kv_len)
    if mask.device != device:
        raise errors.wrong_device(("packed_custom_mask", mask), device=device)
    _check_memory("packed_custom_mask", mask)


def _check_float32(name: str, value: Any, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise errors.not_a_tensor((name, value))
    if value.dtype != torch.float32:
        raise errors.not_float32(name, value)
    if value.device != device:
        raise errors.wrong_device((name, value), device=device)
    if value.requires_grad and torch.is_grad_enabled():
        raise errors.forward_only(name)
    _check_memory(name, value)


def _check_per_head(name: str, value: Any, heads: int, what: str, device: torch.device) -> None:
    _check_float32(name, value, device)
    if value.dim() != 1 or value.shape[0] != heads:
        raise errors.bad_per_head(name, value, heads, what, one_element=False)


def _per_head_scale(
    name: str, value: Tensor, heads: int, what: str, device: torch.device
) -> Tensor:
    _check_float32(name, value, device)
    if value.dim() == 1 and value.shape[0] == heads:
        return value
    if value.numel() != 1:
        raise errors.bad_per_head(name, value, heads, what, one_element=True)
    return value.reshape(1).expand(heads)


def _times_scalar(
    name: str, factor: Tensor, scale: Tensor | None, heads: int, device: torch.device
) -> Tensor:
    _check_float32(name, factor, device)
    if factor.numel() != 1:
        raise errors.not_one_element(name, factor)
    factor = factor.reshape(1)
    return factor.expand(heads) if scale is None else scale * factor


def _check_result(
    name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(value, Tensor):
        raise errors.not_a_tensor((name, value))
    if value.layout is not torch.strided:
        raise errors.not_strided((name, value))
    if tuple(value.shape) != shape:
        raise errors.bad_result_shape(name, value, shape)
    if value.dtype != dtype:
        raise errors.bad_result_dtype(name, value, dtype)
    if value.device != device:
        raise errors.wrong_device((name, value), device=device)
    if value.requires_grad and torch.is_grad_enabled():
        raise errors.forward_only(name)
    _check_memory(name, value)
    if not value.is_contiguous() and _may_overlap_itself(value):
        raise errors.result_overlaps_itself(name, value)


def _may_overlap_itself(tensor: Tensor) -> bool:
    """Whether some dimension does not step over all that the dimensions of smaller stride span.

    Then elements share memory, but for contrived strides that interleave.
    """
    sizes, strides = tensor.shape, tensor.stride()
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if size <= 1:
            continue
        span = 0
        for j, (other_size, other) in enumerate(zip(sizes, strides, strict=True)):
            if j != i and other <= stride:
                span += (other_size - 1) * other
        if stride <= span:
            return True
    return False


_warned_causal_with_mask = False


def _warn_causal_with_mask() -> None:
    """Once per process: a loop over layers should not say it a hundred times."""
    global _warned_causal_with_mask
    if not _warned_causal_with_mask:
        _warned_causal_with_mask = True
        warnings.warn(
            errors.CAUSAL_WITH_MASK, UserWarning, stacklevel=4
        )  # the caller of the public function
