"""All tensors of a call in one allocation, amid bytes of 0xFF: NaN in every float, True, set bits.

What a kernel reads beside a tensor so shows in its result, and what it writes there shows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FENCE_BYTES = 16384
"""More than a tile of 64 rows of 128 16-bit elements; a multiple of every alignment."""
ALIGNMENT = 256


@dataclass
class Fenced:
    """Tensors with fences before, between and after them."""

    memory: Tensor
    """uint8, all of it."""
    before: Tensor
    """What it held when the tensors were put in."""
    tensors: list[Tensor]
    spans: list[slice]
    """Where each tensor's storage lies."""

    def written(self, results: Sequence[int]) -> Tensor:
        """Bool per byte: changed, and not within the storages of those tensors."""
        changed = self.memory != self.before
        for number in results:
            changed[self.spans[number]] = False
        return changed


def fenced(tensors: Sequence[Tensor]) -> Fenced:
    """Copies of the tensors, each with its storage, strides and address modulo 256."""
    storages = [x.untyped_storage() for x in tensors]
    starts, end = [], FENCE_BYTES
    for storage in storages:
        starts.append(end + storage.data_ptr() % ALIGNMENT)
        end = -(-(starts[-1] + storage.nbytes() + FENCE_BYTES) // ALIGNMENT) * ALIGNMENT
    device = tensors[0].device
    memory = torch.full((end + ALIGNMENT,), 0xFF, dtype=torch.uint8, device=device)
    memory = memory[-memory.data_ptr() % ALIGNMENT :][:end]
    moved, spans = [], []
    for tensor, storage, start in zip(tensors, storages, starts, strict=True):
        span = slice(start, start + storage.nbytes())
        as_bytes = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        memory[span].copy_(as_bytes)
        flat = memory[span].view(tensor.dtype)
        offset = flat.storage_offset() + tensor.storage_offset()
        moved.append(flat.as_strided(tensor.shape, tensor.stride(), offset))
        spans.append(span)
    return Fenced(memory, memory.clone(), moved, spans)
