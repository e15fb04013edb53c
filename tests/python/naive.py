"""The spec once more, as naively as it can be written: numpy, float64, one row at a time.

`assert_exact` holds the reference backend against it.
"""

import math

import numpy as np
import torch

from prefill.reference import reference_attention
from prefill.request import make_request


def _array(x):
    return x.to(torch.float64).numpy()


def _rotate(x, first_position, scale, theta, dtype):
    """Rotate x [len, heads, dim] and round it to dtype, pair by pair."""
    length, _, dim = x.shape
    result = np.empty_like(x)
    for r in range(length):
        for d in range(dim // 2):
            angle = (first_position + r) / scale * theta ** (-2 * d / dim)
            x1, x2 = x[r, :, d], x[r, :, d + dim // 2]
            result[r, :, d] = x1 * math.cos(angle) - x2 * math.sin(angle)
            result[r, :, d + dim // 2] = x2 * math.cos(angle) + x1 * math.sin(angle)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        result = np.clip(result, -torch.finfo(dtype).max, torch.finfo(dtype).max)
    return _array(torch.from_numpy(result).to(dtype))


def _slope(head, num_heads):
    n = 2 ** math.floor(math.log2(num_heads))
    return 2 ** (-8 * (head + 1) / n) if head < n else 2 ** (-4 * (2 * (head - n) + 1) / n)


def _scale(scale, head):
    if scale is None:
        return 1.0
    if isinstance(scale, torch.Tensor):
        return float(scale.reshape(-1)[head if scale.numel() > 1 else 0])
    return scale


def naive_attention(
    q,
    k,
    v,
    scale_q=None,
    scale_k=None,
    scale_v=None,
    custom_mask=None,
    packed_custom_mask=None,
    causal=False,
    kv_layout="NHD",
    pos_encoding_mode="NONE",
    sm_scale=None,
    window_left=-1,
    logits_soft_cap=None,
    rope_scale=1.0,
    rope_theta=1e4,
    k_scale=1.0,
    v_scale=1.0,
    alibi_slopes=None,
    sinks=None,
    lse_base="2",
    **_,
):
    """Return output and LSE in float64; arguments as single_prefill_with_kv_cache has them."""
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    qo_len, num_qo_heads, dim = q.shape
    kv_len, num_kv_heads, dim_vo = v.shape
    off = kv_len - qo_len
    sm_scale = 1 / math.sqrt(dim) if sm_scale is None else sm_scale
    qs, ks, vs = _array(q), _array(k), _array(v)
    if pos_encoding_mode == "ROPE_LLAMA":
        qs = _rotate(qs, off, rope_scale, rope_theta, q.dtype)
        ks = _rotate(ks, 0, rope_scale, rope_theta, q.dtype)
    mask = np.ones((qo_len, kv_len), dtype=bool)
    if packed_custom_mask is not None:
        bits = np.unpackbits(packed_custom_mask.numpy(), bitorder="little")
        mask = bits[: qo_len * kv_len].reshape(qo_len, kv_len).astype(bool)
    elif custom_mask is not None:
        mask = custom_mask.numpy()
    elif causal:
        mask = np.array([[j <= i + off for j in range(kv_len)] for i in range(qo_len)], dtype=bool)
        mask = mask.reshape(qo_len, kv_len)

    out = np.zeros((qo_len, num_qo_heads, dim_vo))
    lse = np.full((qo_len, num_qo_heads), -np.inf)
    for h in range(num_qo_heads):
        hk = h // (num_qo_heads // num_kv_heads)
        scale = sm_scale * k_scale * _scale(scale_q, h) * _scale(scale_k, hk)
        for i in range(qo_len):
            pos = i + off
            seen = [
                j
                for j in range(kv_len)
                if mask[i, j] and (window_left < 0 or j >= pos - window_left)
            ]
            terms = []
            for j in seen:
                logit = scale * float(qs[i, h] @ ks[j, hk])
                if logits_soft_cap is not None and logits_soft_cap > 0:
                    logit = logits_soft_cap * math.tanh(logit / logits_soft_cap)
                if pos_encoding_mode == "ALIBI":
                    given = alibi_slopes is not None
                    slope = float(alibi_slopes[h]) if given else _slope(h, num_qo_heads)
                    logit += slope * (j - pos)
                terms.append(logit)
            if sinks is not None:
                terms.append(float(sinks[h]))
            if not terms:
                continue
            peak = max(terms)
            weights = [math.exp(t - peak) for t in terms]
            total = sum(weights)
            lse[i, h] = peak + math.log(total)
            for j, weight in zip(seen, weights, strict=False):  # the sink has no value
                out[i, h] += weight / total * vs[j, hk]
            out[i, h] *= _scale(scale_v, hk) * v_scale
    return torch.from_numpy(out), torch.from_numpy(lse if lse_base == "e" else lse / math.log(2))


def reference(q, k, v, **arguments):
    """Return output and LSE of the reference backend; arguments as the public function's."""
    return reference_attention(make_request(q, k, v, return_lse=True, **arguments))


def assert_exact(q, k, v, **arguments):
    """Compare reference and naive: the output to its dtype's rounding, the LSE to float32's."""
    out, lse = reference(q, k, v, **arguments)
    naive_out, naive_lse = naive_attention(q, k, v, **arguments)
    assert lse.dtype == torch.float32
    # float64's own error and the rule's float32 slopes; then one rounding to the result's dtype.
    exact_out, exact_lse = naive_out.to(out.dtype), naive_lse.to(torch.float32)
    spacing = torch.finfo(out.dtype).eps
    torch.testing.assert_close(
        out.to(torch.float64), exact_out.to(torch.float64), rtol=spacing, atol=1e-7
    )
    torch.testing.assert_close(lse, exact_lse, rtol=2e-7, atol=2e-6)
    return out, lse


def make_qkv(qo_len, kv_len, heads, head_dim, dtype=torch.float16, seed=0, spread=1.0):
    """Return seeded normal q, k, v (NHD) times `spread`; head_dim is one number or (QK, VO)."""
    num_qo_heads, num_kv_heads = heads
    dim_qk, dim_vo = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    return (
        normal(qo_len, num_qo_heads, dim_qk),
        normal(kv_len, num_kv_heads, dim_qk),
        normal(kv_len, num_kv_heads, dim_vo),
    )
