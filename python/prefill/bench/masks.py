"""Which pairs of row and key are seen, and how many: ranges, and the custom masks of the grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from prefill.packing import unpack_mask_block
from prefill.reference import Span, range_mask

PADDED = 0.3
BLOCKS = 8
_ROWS = 1024  # made at a time where a pair takes more than its bool


class Mask(NamedTuple):
    """A custom mask of any size."""

    make: Callable[[int, int, torch.device], Tensor]
    """Bool [qo_len, kv_len], True = keep."""
    pairs: Callable[[int, int], float]
    """How many pairs it keeps; of the cells on a triangle's edge, half, as causal is counted."""


def visible_pairs(qo_len: int, kv_len: int, causal: bool, window_left: int) -> float:
    """Visible pairs as an area: causal over a square is half of it."""

    def triangle(side: int) -> float:
        return max(side, 0) ** 2 / 2

    offset = kv_len - qo_len
    pairs = triangle(kv_len) - triangle(offset) if causal else float(qo_len * kv_len)
    if window_left >= 0:
        width = window_left + 1
        pairs -= triangle(kv_len - width) - triangle(offset - width)
    return pairs


def visible(
    qo_len: int, kv_len: int, causal: bool, window_left: int, device: torch.device
) -> Tensor:
    """Bool [qo_len, kv_len]: what `causal` and `window_left` let each row see."""
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool, device=device)
    for rows in Span(0, qo_len).split(_ROWS):
        part = range_mask(rows, Span(0, kv_len), kv_len - qo_len, causal, window_left, device)
        if part is not None:
            seen[rows.as_slice] = part
    return seen


def unpack(packed: Tensor, qo_len: int, kv_len: int) -> Tensor:
    """Bool [qo_len, kv_len] of a `packed_custom_mask`."""
    mask = torch.empty(qo_len, kv_len, dtype=torch.bool, device=packed.device)
    for rows in Span(0, qo_len).split(_ROWS):
        mask[rows.as_slice] = unpack_mask_block(packed, rows, (0, kv_len), kv_len)
    return mask


def alibi_bias(slopes: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, qo_len, kv_len]: what ALiBi adds to the logits, -inf where a key is not seen."""
    qo_len, kv_len = seen.shape
    bias = torch.empty(1, len(slopes), qo_len, kv_len, dtype=dtype, device=seen.device)
    key = torch.arange(kv_len, device=seen.device, dtype=torch.float32)
    for rows in Span(0, qo_len).split(_ROWS):
        row = torch.arange(rows.start, rows.stop, device=seen.device) + kv_len - qo_len
        distance = (key - row[:, None]).masked_fill(~seen[rows.as_slice], -torch.inf)
        for head, slope in enumerate(slopes):
            bias[0, head, rows.as_slice] = slope * distance
    return bias


def _tril(qo_len: int, kv_len: int, device: torch.device) -> Tensor:
    return visible(qo_len, kv_len, causal=True, window_left=-1, device=device)


def _tril_pairs(qo_len: int, kv_len: int) -> float:
    return visible_pairs(qo_len, kv_len, causal=True, window_left=-1)


def _kept_keys(kv_len: int) -> int:
    return kv_len - int(PADDED * kv_len)


def _padding(qo_len: int, kv_len: int, device: torch.device) -> Tensor:
    return (torch.arange(kv_len, device=device) < _kept_keys(kv_len)).repeat(qo_len, 1)


def _padding_pairs(qo_len: int, kv_len: int) -> float:
    return float(qo_len * _kept_keys(kv_len))


def _blocks(qo_len: int, kv_len: int, device: torch.device) -> Tensor:
    row = torch.arange(qo_len, device=device) * BLOCKS // qo_len
    key = torch.arange(kv_len, device=device) * BLOCKS // kv_len
    return row[:, None] == key


def _blocks_pairs(qo_len: int, kv_len: int) -> float:
    def size(block: int, length: int) -> int:  # of the i with i * BLOCKS // length == block
        first, last = (-(-edge * length // BLOCKS) for edge in (block, block + 1))
        return last - first

    return float(sum(size(block, qo_len) * size(block, kv_len) for block in range(BLOCKS)))


def _random(qo_len: int, kv_len: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    mask = torch.empty(qo_len, kv_len, dtype=torch.bool, device=device)
    return mask.bernoulli_(0.5, generator=generator)


def _random_pairs(qo_len: int, kv_len: int) -> float:
    return qo_len * kv_len / 2


def _tree(qo_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The rows are the nodes of a binary tree: each sees its ancestors, itself and what is before.

    As when several drafts of a continuation are verified at once.
    """
    nodes = torch.zeros(qo_len, qo_len, dtype=torch.bool)
    for node in range(qo_len):
        if node > 0:
            nodes[node] = nodes[(node - 1) // 2]
        nodes[node, node] = True
    before = torch.ones(qo_len, kv_len - qo_len, dtype=torch.bool)
    return torch.cat((before, nodes), 1).to(device)


def _tree_pairs(qo_len: int, kv_len: int) -> float:
    return float(sum(kv_len - qo_len + (node + 1).bit_length() for node in range(qo_len)))


TRIL = Mask(_tril, _tril_pairs)
PADDING = Mask(_padding, _padding_pairs)
BLOCK_DIAGONAL = Mask(_blocks, _blocks_pairs)
RANDOM = Mask(_random, _random_pairs)
TREE = Mask(_tree, _tree_pairs)
