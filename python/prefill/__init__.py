"""Attention of one request over its key/value cache, on CUDA kernels or plain torch."""

from prefill._version import __version__
from prefill.api import (
    explain,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from prefill.merge import merge_state, merge_states
from prefill.packing import packbits, segment_packbits
from prefill.quantize import quantize_per_head

__all__ = [
    "__version__",
    "explain",
    "merge_state",
    "merge_states",
    "packbits",
    "quantize_per_head",
    "segment_packbits",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
