"""A long prompt in chunks, over a cache that is never in one piece.

The rows of a prompt go through in chunks. Their keys lie in blocks (pages on the host, say, of
which two fit the device at a time), so each chunk attends to one block after another and merges the
partial results by their LSE. No more than one block of keys and one chunk of rows is needed at
once, and the result is that of one causal call over everything.

Run it: python examples/long_context_chunks.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefill import (
    merge_state,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, CHUNK = 600, 128  # the last chunk is shorter
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64


def prefill_chunk(q: Tensor, blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the newest rows, whose own keys and values are the last block.

    q `[rows, heads, dim]`; each block k and v `[keys, kv heads, dim]`, oldest first.
    """
    state: tuple[Tensor, Tensor] | None = None
    for number, (k, v) in enumerate(blocks):
        newest = number == len(blocks) - 1
        # Every row sees all of the older blocks; in its own chunk it sees what is not after it.
        partial = single_prefill_with_kv_cache_return_lse(q, k, v, causal=newest)
        state = partial if state is None else merge_state(*state, *partial)
    assert state is not None, "a chunk has its own keys at least"
    return state[0]


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(LENGTH, heads, HEAD_DIM).to(DEVICE, torch.float16)
        for heads in (NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    cache: list[tuple[Tensor, Tensor]] = []
    chunks = []
    for rows, keys, values in zip(q.split(CHUNK), k.split(CHUNK), v.split(CHUNK), strict=True):
        cache.append((keys, values))
        chunks.append(prefill_chunk(rows, cache))
    out = torch.cat(chunks)

    whole = single_prefill_with_kv_cache(q, k, v, causal=True)
    # Partial results are rounded to float16 before they are merged.
    torch.testing.assert_close(out, whole, rtol=2e-3, atol=2e-3)
    error = (out - whole).abs().max().item()
    print(f"{LENGTH} rows in {len(chunks)} chunks: largest difference from one call {error:.1e}")


if __name__ == "__main__":
    main()
