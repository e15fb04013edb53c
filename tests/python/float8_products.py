"""Products of float8 values as this device's tensor cores add them up."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

E4M3 = torch.float8_e4m3fn


def float8_product(a: Tensor, b: Tensor) -> Tensor:
    """`a` [heads, m, k] times `b` [heads, k, n], both float32 that hold float8 values.

    By torch's own float8 matmul, which with fast accumulation leaves sums where WGMMA has them, as
    FlashAttention-3 does. It takes e4m3fn: values of e5m2 are multiplied by a power of two that
    brings the largest into its range, and lose digits where they are below 2^-14 of that.
    """
    (a8, of_a), (b8, of_b) = _e4m3(a), _e4m3(b)
    one = torch.ones((), device=a.device)
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for head in range(a.shape[0]):
        padded = torch._scaled_mm(  # of lengths that are multiples of 16, b column by column
            _padded(a8[head]).contiguous(),
            _padded(b8[head]).t().contiguous().t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
            use_fast_accum=True,
        )
        out[head] = padded[: a.shape[1], : b.shape[2]]
    return out / (of_a * of_b)


def _e4m3(x: Tensor) -> tuple[Tensor, float]:
    largest = x.abs().amax().item()
    scale = 1.0 if largest <= 448.0 else 2.0 ** math.floor(math.log2(448.0 / largest))
    return (x * scale).to(E4M3), scale


def _padded(x: Tensor) -> Tensor:
    rows, columns = x.shape
    return pad(x.float(), (0, -columns % 16, 0, -rows % 16)).to(E4M3)
