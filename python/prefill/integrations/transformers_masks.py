"""The masks that transformers' models ask for, as ranges of keys wherever they are ranges.

A model describes a mask by a function of (request, head, row, key) and by a padding mask. Plain
causal, windowed causal and full attention are recognised; beside padding at either end of each
request they need no mask. Everything else (packed sequences, chunks, windows to both sides, padding
with holes) becomes the bool mask that transformers' "sdpa" would get.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from prefill.integrations.visible_keys import Request, VisibleKeys


class Pattern(NamedTuple):
    """What `single_prefill_with_kv_cache` calls the same."""

    causal: bool
    window_left: int


def prefill_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """The mask of one forward pass, in the form of transformers' mask functions.

    Row i of a request stands at position `q_offset + i`, key j at `kv_offset + j`; `attention_mask`
    is bool `[batch, positions]`, False = padding. Returns `VisibleKeys`, or a bool mask `[batch, 1,
    q_length, kv_length]`. Reads the padding mask on the host once; not while it is traced, when the
    mask is laid out.
    """

    def lay_out() -> Tensor:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor = masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size,
            device=device,
            **(others | skips),
        )
        return mask

    pattern = None if is_tracing(attention_mask) else _pattern(mask_function, local_size)
    if pattern is None:
        return lay_out()
    positions = _real_positions(attention_mask, batch_size, kv_offset + kv_length)
    if positions is None:
        return lay_out()
    first_row = int(q_offset)
    requests = [
        _request(real, (first_row, first_row + q_length), (kv_offset, kv_length), pattern.causal)
        for real in positions
    ]
    return VisibleKeys.make(requests, (q_length, kv_length), *pattern, lay_out, device)


def _pattern(mask_function: Callable[..., Any], local_size: int | None) -> Pattern | None:
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(True, -1)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern(False, -1)
    if local_size is None or local_size < 1:  # a window without a key has no window_left
        return None
    windowed = masking_utils.sliding_window_causal_mask_function(local_size)
    # Of a row and the keys before it transformers' window holds local_size.
    return Pattern(True, local_size - 1) if _same(mask_function, windowed) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two functions were made by one line of code, from the same functions and numbers."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other)]
        return one.__code__ is other.__code__ and _same(*map(tuple, cells))
    return isinstance(one, int) and isinstance(other, int) and one == other


def _real_positions(
    attention_mask: Tensor | None, batch_size: int, end: int
) -> list[tuple[int, int]] | None:
    """Each request's positions that are no padding, half-open; None where padding has holes."""
    if attention_mask is None:
        return [(0, end)] * batch_size
    size = attention_mask.shape[-1]
    real = attention_mask.to(torch.uint8)
    ends = torch.stack((real.sum(-1), real.argmax(-1), size - real.flip(-1).argmax(-1)), -1)
    positions = []
    for count, first, last in ends.tolist():
        if count not in (0, last - first):
            return None
        positions.append((first, last) if count else (0, 0))
    return positions


def _request(
    real: tuple[int, int], rows: tuple[int, int], keys: tuple[int, int], causal: bool
) -> Request:
    """The request's rows and keys, counted from the first of the padded batch.

    `real` and `rows` are positions; `keys` is (first position, length). With causal, rows of
    padding are left out, and keys end with the last row, which is how rows and keys align. Without,
    rows may belong to another sequence than the keys (cross-attention), so all stay.
    """
    first_key, kv_length = keys
    stop = min(real[1], first_key + kv_length)
    if causal:
        first = max(real[0], rows[0])
        stop = min(stop, rows[1])
        kept = (first - rows[0], max(first, stop) - rows[0])
    else:
        kept = (0, rows[1] - rows[0])
    begin = max(real[0], first_key) - first_key
    return Request(kept, (begin, max(begin, stop - first_key)))
