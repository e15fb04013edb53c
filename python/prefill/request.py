"""One attention call, validated and normalised.

`PrefillRequest` is the only form in which a call travels on from here: every backend, the resolver and `explain` read
it and nothing else. Values in it are already checked, defaults are filled in, and arguments that mean the same thing
have one spelling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRequest:
    """A checked call. Shapes use `Hq = num_qo_heads`, `Hk = num_kv_heads`; `off = kv_len - qo_len`.

    The sum that a backend computes, with `hk = h // (Hq // Hk)` and `pos(i) = i + off`:

    ```
    logit = sm_scale * scale_q[h] * scale_k[hk] * (q'_i . k'_j)       (a scale that is None counts as 1)
    logit = logits_soft_cap * tanh(logit / logits_soft_cap)           if logits_soft_cap > 0
    logit = logit + slope[h] * (j - pos(i))                           if pos_encoding_mode == "ALIBI"
    seen(i, j) = mask bit (if any) and (j <= pos(i) if causal) and (j >= pos(i) - window_left if window_left >= 0)
    out = softmax over the seen j (and the sink) of logit, times v_j * scale_v[hk] * v_scale
    lse = log of the softmax denominator, in base `lse_base`
    ```
    """

    q: Tensor
    """[qo_len, Hq, head_dim_qk], as given."""
    k: Tensor
    """[kv_len, Hk, head_dim_qk]: always NHD-shaped; for kv_layout "HND" a transposed view of what was given."""
    v: Tensor
    """[kv_len, Hk, head_dim_vo]: as `k`."""

    qo_len: int
    kv_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int

    scale_q: Tensor | None
    """float32 [Hq] on q's device, perhaps with stride 0, or None. Floats are folded into `sm_scale` instead."""
    scale_k: Tensor | None
    """float32 [Hk] as `scale_q`; a `k_scale` that was given as a tensor is folded in here, on the device."""
    scale_v: Tensor | None
    """float32 [Hk] as `scale_q`; a `v_scale` that was given as a tensor is folded in here, on the device."""
    sm_scale: float
    """The softmax scale times every scale of q and k that was given as a float. Any value: 0 and negative too."""
    v_scale: float
    """The product of `scale_v` and `v_scale` as far as they were given as floats, else 1."""

    o_dtype: torch.dtype
    """dtype of the output; q's, or bfloat16 for fp8 q, where the caller did not say."""

    custom_mask: Tensor | None
    """bool [qo_len, kv_len], True = keep, any strides; None if absent or if `packed_custom_mask` is there."""
    packed_custom_mask: Tensor | None
    """uint8 [ceil(qo_len * kv_len / 8)], bit `i * kv_len + j`, little-endian; bits past the end mean nothing."""
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
    """float32 [Hq]: a logit (natural units) per head that joins the denominator and has no value, or None."""
    use_fp16_qk_reduction: bool
    """The QK product may accumulate in fp16 (saturating); the exact fp32 result is always allowed."""

    return_lse: bool
    lse_base: Literal["2", "e"]

    out: Tensor | None
    """[qo_len, Hq, head_dim_vo] of o_dtype, any strides, for the result. `ops` fills it: backends may ignore it."""
    lse: Tensor | None
    """float32 [qo_len, Hq], any strides, for the LSE; only with `return_lse`. As `out`."""

    kv_layout: Literal["NHD", "HND"]
    """As given. `k` and `v` are NHD-shaped whatever this says."""
    backend: Literal["auto", "fa2", "fa3", "reference"]
    """As given."""
