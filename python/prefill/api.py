"""The public functions: attention over the keys and values of one request."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from prefill import ops, support
from prefill.backends import resolve
from prefill.explain import Explanation, explain_request
from prefill.request import PrefillRequest, make_request


@overload
def single_prefill_with_kv_cache(
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
    return_lse: Literal[False] = False,
    *,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: Literal["2", "e", 2] = "2",
) -> Tensor: ...


@overload
def single_prefill_with_kv_cache(
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
    *,
    return_lse: Literal[True],
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: Literal["2", "e", 2] = "2",
) -> tuple[Tensor, Tensor]: ...


@overload
def single_prefill_with_kv_cache(
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
    lse_base: Literal["2", "e", 2] = "2",
) -> Tensor | tuple[Tensor, Tensor]: ...


def single_prefill_with_kv_cache(
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
    lse_base: Literal["2", "e", 2] = "2",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one request's queries over its keys and values: prefill or append.

    Names, order and defaults follow `flashinfer.prefill.single_prefill_with_kv_cache`; the
    arguments behind the `*` are newer FlashInfer's or this package's. With `off = kv_len - qo_len`,
    `pos(i) = i + off` and `hk = h // (num_qo_heads // num_kv_heads)`, query row i of head h and key
    j give

        logit = sm_scale * k_scale * scale_q[h] * scale_k[hk] * (q'_i . k'_j)

    where ' is the rotation of "ROPE_LLAMA", if asked for. Then the soft cap, then ALiBi, then the
    masks; then the softmax over j, joined by the sink of the head; and `out = sum_j p_ij * v_j *
    scale_v[hk] * v_scale`.

    Args:
        q: [qo_len, num_qo_heads, head_dim_qk]. Head dims are multiples of 8 up to 256; num_qo_heads
            is a multiple of num_kv_heads.
        k: [kv_len, num_kv_heads, head_dim_qk], or [num_kv_heads, kv_len, head_dim_qk] with
            kv_layout="HND".
        v: As k, with head_dim_vo, which may differ from head_dim_qk.
            dtypes: q, k, v all float16, all bfloat16, or all float8 (e4m3fn, e5m2); or
            float16/bfloat16 q with float8 k and v. Strides: any. Where the last one is not 1, an
            outer one is not a multiple of 8 elements, or the address is not a multiple of 16 bytes,
            fa2 and fa3 work on a copy; `explain` says so. q, k and v of one float8 dtype are
            multiplied in it by fa3 where docs/fp8.md says, with softmax weights in e4m3fn. Any
            other float8 is widened first, which is exact: to q's dtype, and with q to bfloat16
            for a bfloat16 output, else to float16.
        scale_q: Multiplier of q, e.g. to dequantise float8: float32 [num_qo_heads] or one element
            on q's device, or a float. Counts for 16-bit inputs too.
        scale_k: Likewise for k, [num_kv_heads].
        scale_v: Likewise for v, [num_kv_heads].
        o_dtype: dtype of the output: float16, bfloat16 or float32. Default: q's, or bfloat16 for
            float8 q. Where it is not what the kernel writes (its own dtype, or bfloat16 if that is
            float8), the call needs scratch memory for the output in float32.
        custom_mask: bool [qo_len, kv_len], True = keep. Any strides; fa2 and fa3 read it where it
            lies, or a copy where its last dimension is not dense.
        packed_custom_mask: uint8 [ceil(qo_len * kv_len / 8)]: bit `i * kv_len + j`, little-endian,
            as `packbits(mask.flatten(), bitorder="little")` gives it. Wins over custom_mask, which
            is then not looked at.
        causal: Row i sees the keys `j <= pos(i)` (bottom-right). No effect where a mask is given;
            both warn once.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; "ROPE_LLAMA" rotates q at pos(i) and k at j, pairing dimension d
            with d + D/2, by angle `pos / rope_scale * rope_theta ** (-2 * d / D)`, and rounds to
            q's dtype (what is past the range of a float8 to its largest value); "ALIBI" adds
            `slope[h] * (j - pos(i))`. (FlashInfer leaves `off` out of ALiBi: the same output,
            another LSE.)
        use_fp16_qk_reduction: q . k may accumulate in float16 (saturating) where a backend is
            faster for it. Needs float16 q and k. No backend does so far: all accumulate in
            float32, which is more exact, and which tensor cores of A100 and H100 do at one rate.
        sm_scale: Any float, 0 and below too. Default 1 / sqrt(head_dim_qk).
        window_left: Row i sees `j >= pos(i) - window_left` (inclusive: 0 with causal is the row's
            own key). Negative: off. There is no right bound without causal.
        logits_soft_cap: c > 0 makes each logit `c * tanh(logit / c)`. None, 0 and below: off.
        rope_scale: Default 1. Only with "ROPE_LLAMA".
        rope_theta: Default 1e4. Only with "ROPE_LLAMA".
        backend: "auto" takes the fastest that this build, device and call allow (fa3, fa2,
            reference: `explain` tells); "fa2", "fa3" and "reference" name one, which never gives
            way to another.
        return_lse: Also return the LSE.
        k_scale: One more multiplier of k: a float, or float32 of one element on q's device.
        v_scale: One more multiplier of v, likewise.
        out: Receives the result: [qo_len, num_qo_heads, head_dim_vo] of o_dtype, any strides that
            give each element its own address. Must not overlap an input; this is not checked.
        lse: Receives the LSE: float32 [qo_len, num_qo_heads], any strides. Only with
            return_lse=True.
        alibi_slopes: float32 [num_qo_heads]; default the paper's rule. Only with "ALIBI".
        sinks: float32 [num_qo_heads]: a logit per head that joins the softmax denominator and has
            no value.
        lse_base: "2", or "e" for natural logarithms. Without return_lse it changes nothing.

    Returns:
        The output [qo_len, num_qo_heads, head_dim_vo]; with return_lse a pair of it and the LSE,
        float32 [qo_len, num_qo_heads]: `log2(sum_j exp(logit))`, **base 2** as FlashInfer's on
        every backend. It holds sm_scale, caps, biases, q and k scales and sinks, not the v scales.
        A row that sees no key has output 0 and LSE -inf (with a sink: sink * log2(e)).

    Raises:
        ValueError: A shape, size or value out of range, an unknown word, tensors on several
            devices, or an argument that would have no effect.
        TypeError: A dtype or kind of object that is not taken.
        NotImplementedError: The named backend, or this build of it, lacks the combination (the text
            names one that can); or an input requires grad in grad mode: this is a forward pass
            only.
        RuntimeError: CUDA's own, with its error name.

    Notes:
        Runs on the current stream of q's device, which need not be the current device; no host
        synchronisation and no state between calls. torch.autocast changes nothing: no tensor is
        cast. The same inputs give the same bits. NaN or
        infinity in a masked key never reaches a result; in the value of a masked key it can, where
        its tile is computed for other keys (0 * NaN). Memory past qo_len and kv_len is never used.
    """
    request = make_request(
        q,
        k,
        v,
        scale_q,
        scale_k,
        scale_v,
        o_dtype,
        custom_mask,
        packed_custom_mask,
        causal,
        kv_layout,
        pos_encoding_mode,
        use_fp16_qk_reduction,
        sm_scale,
        window_left,
        logits_soft_cap,
        rope_scale,
        rope_theta,
        backend,
        return_lse,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        lse=lse,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        lse_base=lse_base,
    )
    return _run(request)


def single_prefill_with_kv_cache_return_lse(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """`single_prefill_with_kv_cache` with return_lse=True and otherwise the same arguments."""
    request = make_request(q, k, v, *args, **{**kwargs, "return_lse": True})
    return cast("tuple[Tensor, Tensor]", _run(request))


def explain(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Explanation:
    """What `single_prefill_with_kv_cache` would do with the same arguments, without doing it.

    What the call would refuse on every backend is refused here too: ValueError, TypeError, and
    NotImplementedError for an input that requires grad in grad mode. Where the named backend alone
    cannot, the explanation's backend is None and its reason is the text of the error.
    """
    return explain_request(make_request(q, k, v, *args, **kwargs))


def _run(request: PrefillRequest) -> Tensor | tuple[Tensor, Tensor]:
    backend = resolve(request, support.device_info(request.q.device))
    out, lse = ops.run(backend, request)
    return out if lse is None else (out, lse)
