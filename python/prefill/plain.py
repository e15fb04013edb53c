"""Attention as the textbook writes it: one float64 softmax over all logits at once.

What `python -m prefill check` holds the reference backend against. It shares no code with it, does
nothing in blocks and minds no memory: for small calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    custom_mask: Tensor | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    rotated: bool = False,
    sinks: Tensor | None = None,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[qo_len, num_qo_heads, head_dim_vo]` and base-2 LSE, float64; k and v are NHD."""
    (qo_len, heads, head_dim), kv_len = q.shape, k.shape[0]
    position = torch.arange(kv_len - qo_len, kv_len, device=q.device)
    key = torch.arange(kv_len, device=q.device)
    if rotated:
        q, k = _rotate(q, position), _rotate(k, key)

    def by_head(x: Tensor) -> Tensor:
        """[heads, length, dim]"""
        return x.double().repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)

    def factor(scale: Tensor | None) -> Tensor:
        """[heads, 1, 1]"""
        values = torch.ones(1, device=q.device) if scale is None else scale
        return values.double().repeat_interleave(heads // len(values))[:, None, None]

    logits = by_head(q) @ by_head(k).mT * head_dim**-0.5 * factor(scale_q) * factor(scale_k)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    distance = key - position[:, None]
    if alibi_slopes is not None:
        logits = logits + factor(alibi_slopes) * distance
    seen = torch.ones_like(distance, dtype=torch.bool) if custom_mask is None else custom_mask
    if causal:
        seen = seen & (distance <= 0)
    if window_left >= 0:
        seen = seen & (distance >= -window_left)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat((logits, factor(sinks).expand(heads, qo_len, 1)), -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None])[..., :kv_len]
    weights = weights.masked_fill(~seen, 0.0)  # a row without keys: -inf - -inf
    out = weights @ by_head(v) * factor(scale_v)
    return out.transpose(0, 1), lse.t() / math.log(2.0)


def _rotate(x: Tensor, position: Tensor) -> Tensor:
    """ROPE_LLAMA with the default base: pairs as complex numbers, turned and rounded."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    turn = torch.polar(torch.ones_like(frequency), position.double()[:, None, None] * frequency)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)
