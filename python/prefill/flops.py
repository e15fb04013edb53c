"""What `torch.utils.flop_counter.FlopCounterMode` counts for a call on fa2 or fa3.

Multiplications and additions of the two products, over the pairs of row and key that `causal` and
`window_left` leave. The counter gives shapes, not values: a pair that a custom mask hides counts.
Softmax, soft caps, rotations and the like count nothing, as in torch's own formulas. The reference
backend is plain torch: there the counter sees every product that it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula


def visible_pairs(qo_len: int, kv_len: int, window_left: int, window_right: int) -> int:
    """Pairs (i, j) with `pos(i) - window_left <= j <= pos(i) + window_right`; below 0 = no bound.

    `pos(i) = i + kv_len - qo_len`. Without a loop: lengths may be millions.
    """
    first = kv_len - qo_len
    seen = qo_len * kv_len
    if window_right >= 0:
        seen = _clamped_sum(first + window_right + 1, qo_len, kv_len)
    if window_left >= 0:
        seen -= _clamped_sum(first - window_left, qo_len, kv_len)
    return seen


def _clamped_sum(first: int, count: int, top: int) -> int:
    """The sum of min(max(x, 0), top) over the `count` integers from `first` on."""

    def below(end: int) -> int:
        rising = min(max(end, 0), top)  # x < rising counts x, the others below `end` count top
        return rising * (rising - 1) // 2 + max(end - top, 0) * top

    return below(first + count) - below(first)


def attention_flops(
    backend: str,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    out: Sequence[int],
    lse: Sequence[int] | None,
    scale_q: Sequence[int] | None,
    scale_k: Sequence[int] | None,
    scale_v: Sequence[int] | None,
    mask: Sequence[int] | None,
    alibi_slopes: Sequence[int] | None,
    sinks: Sequence[int] | None,
    window_left: int,
    window_right: int,
    *others: object,
    out_shape: object = None,
) -> int:
    """The formula of both ops: their arguments, with shapes in the place of tensors."""
    qo_len, heads, head_dim_qk = q
    kv_len, _, head_dim_vo = v
    pairs = visible_pairs(qo_len, kv_len, window_left, window_right)
    return 2 * heads * pairs * (head_dim_qk + head_dim_vo)


def register() -> None:
    """Tell torch's counter of both ops, which must be defined."""
    ops = torch.ops.prefill
    register_flop_formula([ops.attention, ops.prepared_attention])(attention_flops)
