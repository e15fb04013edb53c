"""What the kernel of a call multiplies in: the library's own rule (`csrc/common/torch_ops.cpp`).

| q, k and v                                   | backend | the kernel is of                        |
|----------------------------------------------|---------|-----------------------------------------|
| q of 16 bits                                 | any     | q's dtype; float8 k and v are widened   |
| all of one float8 dtype, if `_is_native`     | fa3     | that float8 dtype                       |
| any float8, else                             | any     | what is written, or else float16; all   |
|                                              |         | three are widened, which is exact       |

Of 16 bits float16 has the more digits for softmax weights, so it is the one for other outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefill import ops, support
from prefill.request import FP8_DTYPES, PrefillRequest

WIDENED_HEAD_DIM = 64
"""Up to which 16-bit kernels are faster."""
ROW_BYTES = 16
"""What TMA wants rows of float8 elements to be multiples of; 16-bit rows are by other rules."""


def of(backend: str, request: PrefillRequest) -> torch.dtype:
    """The dtype of the kernel of `backend`, fa2 or fa3, for the call."""
    q_dtype = request.q.dtype
    if q_dtype in FP8_DTYPES and _is_native(backend, request):
        return q_dtype
    return widened(q_dtype, request.o_dtype)


def widened(q_dtype: torch.dtype, o_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the 16-bit kernel for such a query and output."""
    if q_dtype not in FP8_DTYPES:
        return q_dtype
    return torch.bfloat16 if o_dtype == torch.bfloat16 else torch.float16


def written_by(dtype: torch.dtype) -> torch.dtype:
    """What a kernel of that dtype writes; for any other output it leaves parts in float32."""
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def _is_native(backend: str, request: PrefillRequest) -> bool:
    """Whether float8 tensors of the call are multiplied as they are."""
    q, k, v = request.q, request.k, request.v
    return (
        backend == "fa3"
        and q.dtype == k.dtype == v.dtype
        and request.pos_encoding_mode != "ROPE_LLAMA"  # rotated values are rounded by a pass
        and max(request.head_dim_qk, request.head_dim_vo) > WIDENED_HEAD_DIM
        and request.head_dim_qk % ROW_BYTES == 0
        and request.head_dim_vo % ROW_BYTES == 0
        and support.has_kernel(backend, q.dtype, request.head_dim_qk, request.head_dim_vo)
        and _has_rows_for_tma(q)
        and _has_rows_for_tma(k)
        and _has_rows_for_tma(v)
    )


def _has_rows_for_tma(tensor: Tensor) -> bool:
    """Whether the op gets the tensor with strides that TMA takes.

    What no kernel can read is copied before, and a copy is dense. An address is unknown while a
    call is traced: then the answer is that of a tensor that is not copied for its address.
    """
    length, heads, _ = tensor.shape
    outer, middle, _ = tensor.stride()
    if (length == 1 or outer % ROW_BYTES == 0) and (heads == 1 or middle % ROW_BYTES == 0):
        return True
    return not ops.has_kernel_strides(tensor) or (
        ops.has_address(tensor) and not ops.is_kernel_ready(tensor)
    )
