"""Positional encodings as the package defines them: LLAMA rotary embedding and ALiBi slopes.

Plain torch, exact to float32, without host synchronisation. The reference backend computes with
these, and a caller can use them to see what `pos_encoding_mode` means.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows are rotated in blocks of about this many elements, so that the float64 copies stay small
# beside q and k.
_BLOCK_ELEMENTS = 1 << 22

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def rope_angles(positions: Tensor, head_dim: int, rope_scale: float, rope_theta: float) -> Tensor:
    """Return `pos / rope_scale * rope_theta^(-2d / head_dim)`, float64 `[len, head_dim / 2]`.

    float64 keeps the angle of position 2^20 right to about 1e-10, far below float32's resolution of
    its sine.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = torch.pow(rope_theta, exponents / -head_dim)
    return (positions.to(torch.float64) / rope_scale)[:, None] * frequencies


def apply_llama_rope(
    x: Tensor,
    first_position: int,
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate `x [len, heads, head_dim]`, whose row r stands at `first_position + r`.

    Returns a new tensor in `dtype` (x's unless given).

    Half rotation (NeoX): dimension d pairs with d + head_dim / 2, and the pair `(x1, x2)` becomes
    `(x1 cos - x2 sin, x2 cos + x1 sin)`. Positions may be negative. The rotation is computed in
    float64 and rounded once; a value past the range of an fp8 `dtype` becomes its largest finite
    value, as the GPU's conversion does.
    """
    length, heads, head_dim = x.shape
    if head_dim % 2:
        raise ValueError(
            f"rotary embedding pairs dimensions: head_dim must be even, got {head_dim}"
        )
    dtype = x.dtype if dtype is None else dtype
    rotated = torch.empty((length, heads, head_dim), dtype=dtype, device=x.device)
    block = max(1, _BLOCK_ELEMENTS // max(1, heads * head_dim))
    for start in range(0, length, block):
        stop = min(start + block, length)
        positions = torch.arange(first_position + start, first_position + stop, device=x.device)
        angles = rope_angles(positions, head_dim, rope_scale, rope_theta)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        x1, x2 = x[start:stop].to(torch.float64).chunk(2, dim=-1)
        result = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
        if dtype in _FP8_DTYPES:
            largest = torch.finfo(dtype).max
            result = result.clamp(-largest, largest)
        rotated[start:stop] = result.to(dtype)
    return rotated


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """Return the ALiBi paper's slopes, float32 `[num_heads]`.

    With n the largest power of two up to `num_heads`: heads 1..n get `2^(-8k / n)` for k = 1..n,
    the rest get `2^(-4k / n)` for k = 1, 3, 5, ... (every second slope of 2n heads).
    """
    if num_heads < 1:
        return torch.empty(0, dtype=torch.float32, device=device)
    n = 1 << (num_heads.bit_length() - 1)
    index = torch.arange(num_heads, dtype=torch.float64, device=device)
    first = (index[:n] + 1) * (-8 / n)
    rest = (2 * (index[n:] - n) + 1) * (-4 / n)
    return torch.exp2(torch.cat((first, rest))).to(torch.float32)
