"""FlashAttention-4, where it is installed (the package flash-attn-4)."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from prefill.bench.cases import Case, Inputs
from prefill.bench.contenders.contender import Call

MODULE = "flash_attn.cute"


class FlashAttention4:
    """`flash_attn_func` of its CuTe DSL kernels, on views of the same tensors.

    They are compiled in the first call of a shape, which is made before anything is captured. Its
    causal masks and windows end at the last key, as here, and a sink is a natural logit.
    """

    name = "flash4"

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        if any(dtype.itemsize == 1 for dtype in case.dtypes):
            raise NotImplementedError("FlashAttention-4 has no float8 on Hopper")
        options = _options(inputs)
        function = importlib.import_module(MODULE).flash_attn_func
        q, k, v = (x.unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v))

        def call() -> Tensor:
            out: Tensor = function(q, k, v, **options)[0]  # the second is an LSE or None
            return out

        return call

    def as_nhd(self, out: Tensor) -> Tensor:
        return out[0]

    def dtype(self, case: Case, inputs: Inputs) -> torch.dtype:
        return case.dtype


NAMES = {
    "causal": "causal",
    "sm_scale": "softmax_scale",
    "logits_soft_cap": "softcap",
    "sinks": "learnable_sink",
}


def _options(inputs: Inputs) -> dict[str, Any]:
    """The arguments under its names; NotImplementedError for those that it has no name for."""
    arguments = dict(inputs.arguments)
    window_left: int = arguments.pop("window_left", -1)
    unknown = [name for name in arguments if name not in NAMES]
    if unknown:
        raise NotImplementedError(f"FlashAttention-4 has no {', '.join(unknown)}")
    options = {NAMES[name]: value for name, value in arguments.items()}
    if window_left >= 0:
        options["window_size"] = (window_left, None)  # causal bounds the right side
    return options
