"""What a kernel that multiplies in float8 is held against, and what 8-bit WGMMA costs it.

The scheme is FlashAttention-3's. Scores of `KEYS` keys at a time; weights relative to the largest
score so far, times `LARGEST`, rounded to e4m3fn whatever q, k and v are; what was summed before is
scaled down where the largest score grows; the divisor is the sum of weights that are not rounded.
`attend` does so with products and sums in float32.

A kernel differs from it in its sums. 8-bit WGMMA adds `STEP` products at a time to what it has, and
of the sum keeps `FRACTION` bits below the power of two of the largest addend; what lies below is
cut. So each step loses up to 2^-FRACTION of the partial sum that it comes to, and of the products
that it adds: `cut` adds this up for q . k, at the partial sums that there are. These are seldom
above a few products, and it comes to about 2^-12 of sum |q_i k_i|, which is the least it is taken
for. Numbers so coarse that every sum fits into FRACTION bits lose nothing.

A logit is off by its share of that, and with it the weights and the LSE (`expect` of `exactness`).
The sums over keys are cut likewise, but begin anew with each tile and are added up in float32: of
at most `LONGEST_TILE` keys they lose up to `OF_SUMS` of sum p_j |v_j|, however many keys there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from prefill.explain import Explanation

KEYS = 128
LARGEST = 256.0
STEP = 8
FRACTION = 13
LONGEST_TILE = 256
OF_SUMS = (LONGEST_TILE / STEP + 1) * 2.0**-FRACTION
UNIT = 2.0**-4
"""Half the epsilon of e4m3fn, of which weights are."""
LEAST = 2.0**-10 / LARGEST
"""By how much a weight may be off that is subnormal in e4m3fn; the largest of its row is 1."""


def is_native(told: Explanation) -> bool:
    """Whether the kernel of the call multiplies in float8."""
    return told.dtype is not None and told.dtype.startswith("float8")


Product = Callable[[Tensor, Tensor], Tensor]


def attend(
    logits: Tensor,
    values: Tensor,
    sink: Tensor,
    keys_of_tile: int = KEYS,
    product: Product = torch.matmul,
) -> Tensor:
    """[heads, rows, head_dim] of float32 logits [heads, rows, keys], -inf where nothing is seen.

    `sink` is [heads, rows, 1]. Tiles come from the last to the first, as in the kernels. Rows that
    see nothing are NaN.
    """
    heads, rows, keys = logits.shape
    largest = logits.new_full((heads, rows, 1), -torch.inf)
    total, out = torch.zeros_like(largest), logits.new_zeros(heads, rows, values.shape[-1])
    for first in reversed(range(0, keys, keys_of_tile)):
        tile = slice(first, first + keys_of_tile)
        scores = logits[..., tile]
        before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
        anchor = largest.masked_fill(largest == -torch.inf, 0.0)
        growth, weights = torch.exp(before - anchor), torch.exp(scores - anchor)
        out = out * growth + product(e4m3(weights * LARGEST), values[:, tile])
        total = total * growth + weights.sum(-1, keepdim=True)
    highest = torch.maximum(largest, sink)
    share = torch.exp(largest - highest)
    return out / LARGEST * share / (total * share + torch.exp(sink - highest))


def e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def cut_product(a: Tensor, b: Tensor, fraction: int = FRACTION) -> Tensor:
    """The product in float32, of whose sum so many bits of fraction are left after each step."""
    total, lost = a.new_zeros(*a.shape[:-1], b.shape[-1]), 23 - fraction
    for first in range(0, a.shape[-1], STEP):
        step = slice(first, first + STEP)
        total = total + a[..., step] @ b[..., step, :]
        total = (total.view(torch.int32) >> lost << lost).view(torch.float32)
    return total


def cut(q: Tensor, k: Tensor) -> Tensor:
    """By how much q . k may be off [heads, rows, keys], of [heads, length, head_dim] each."""
    q, k = q.double(), k.double()
    size = q.abs() @ k.abs().mT
    partial, of_steps = torch.zeros_like(size), torch.zeros_like(size)
    for first in range(0, q.shape[-1], STEP):
        dims = slice(first, first + STEP)
        partial += q[..., dims] @ k[..., dims].mT
        of_steps += partial.abs()
    lost = (torch.maximum(of_steps, size) + size) * 2.0**-FRACTION
    return lost.masked_fill(size < _grid(q) * _grid(k) * 2.0**FRACTION, 0.0)


def _grid(x: Tensor) -> Tensor:
    """The largest power of two, up to 1, of which all elements are multiples."""
    least = 2.0**-20  # below the least of both float8 dtypes
    units = (x.nan_to_num(0.0, 0.0, 0.0) / least).long()
    lowest = units & -units
    return lowest.masked_fill(lowest == 0, round(1 / least)).amin() * least
