"""How a kernel divides a call among the SMs, as the library decides it from shapes alone.

The rule is C++ (`csrc/common/split_plan.h`) and is asked, not repeated: `prefill::split_plan` needs
the library and no device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from prefill import kernel_dtype, ops, support
from prefill.request import PrefillRequest


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Row tiles and parts of the keys of one call."""

    packed_heads: int
    """Query heads of one key head that lie side by side in a row tile; 1 = none are packed."""
    num_splits: int
    """Parts that the keys of a row tile are split into; 1 = no split."""
    num_row_tiles: int
    """Over all heads."""
    num_whole_tiles: int
    """The first row tiles, so many, that are not split where the others are."""


def split_plan(
    backend: str, request: PrefillRequest, num_sms: int, num_splits: int = 0
) -> SplitPlan:
    """The plan of a native backend for a call that is not empty, on a device of so many SMs.

    `num_splits` as in `ops.run`: 0 for the rule's own choice.
    """
    window_left, window_right = ops.bounds(request)
    scale_q = request.scale_q
    is_one_scale = scale_q is None or scale_q.stride(0) == 0
    packs = request.pos_encoding_mode != "ALIBI" and is_one_scale
    dtype = kernel_dtype.of(backend, request)
    answer = _ask(
        backend,
        support.dtype_name(dtype),
        request.qo_len,
        request.kv_len,
        request.num_qo_heads,
        request.num_kv_heads,
        request.head_dim_qk,
        request.head_dim_vo,
        window_left,
        window_right,
        packs,
        request.o_dtype != kernel_dtype.written_by(dtype),
        num_sms,
        num_splits,
    )
    return SplitPlan(**json.loads(answer))


def _ask(*arguments: Any) -> str:
    """The library's answer, in JSON."""
    answer: str = torch.ops.prefill.split_plan(*arguments)
    return answer
