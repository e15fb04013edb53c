"""Tensors at other addresses: views of larger buffers, amid NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def relaid(tensor: Tensor, layout: str) -> Tensor:
    """The same [length, heads, head_dim] values at other addresses."""
    length, heads, head_dim = tensor.shape

    def poison(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=tensor.dtype, device=tensor.device)

    def within(shape: tuple[int, ...], index: tuple[Any, ...]) -> Tensor:
        buffer = poison(*shape)
        buffer[index] = tensor
        return buffer[index]

    everything = slice(None)
    if layout == "heads first":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "fused":
        return within((length, heads + 5, head_dim), (everything, slice(2, 2 + heads)))
    if layout == "rows apart":
        return within((3 * length, heads, head_dim), (slice(0, 3 * length, 3),))
    if layout == "wide heads":
        return within((length, heads, head_dim + 24), (..., slice(8, 8 + head_dim)))
    if layout == "in a cache of heads first":
        values = tensor.transpose(0, 1)
        buffer = poison(heads + 1, length + 77, head_dim)
        buffer[1:, 40 : 40 + length] = values
        return buffer[1:, 40 : 40 + length].transpose(0, 1)
    if layout == "odd strides":
        return within((length, heads, head_dim + 1), (..., slice(0, head_dim)))
    if layout == "odd address":
        flat = poison(tensor.numel() + 3)[3:]
        return flat.view(tensor.shape).copy_(tensor)
    if layout == "last dim apart":
        return within((length, heads, 2 * head_dim), (..., slice(0, 2 * head_dim, 2)))
    assert layout == "last dim first"
    return tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)


IN_PLACE = ["heads first", "fused", "rows apart", "wide heads", "in a cache of heads first"]
COPIED = ["odd strides", "odd address", "last dim apart", "last dim first"]


@dataclass
class Guarded:
    """A result to be given: a view of a buffer that holds NaN."""

    buffer: Tensor
    index: tuple[slice, ...]

    @property
    def view(self) -> Tensor:
        return self.buffer[self.index]

    def written_outside(self) -> Tensor:
        """Bool, of the buffer's shape."""
        outside = torch.ones_like(self.buffer, dtype=torch.bool)
        outside[self.index] = False
        return outside & ~self.buffer.isnan()


def amid_nan(
    shape: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> Guarded:
    """A result of that shape with so many elements around it in each dimension."""
    sizes = [sum(each) for each in zip(before, shape, after, strict=True)]
    buffer = torch.full(sizes, math.nan, dtype=dtype, device=device)
    return Guarded(buffer, tuple(slice(b, b + size) for b, size in zip(before, shape, strict=True)))
