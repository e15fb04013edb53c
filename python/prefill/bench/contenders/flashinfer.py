"""FlashInfer, where it is installed."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from prefill.bench.cases import Case, Inputs
from prefill.bench.contenders.contender import Call


class FlashInfer:
    """FlashInfer's function of the same name, on the backend that it chooses."""

    name = "flashinfer"

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        function = importlib.import_module("flashinfer").single_prefill_with_kv_cache
        q, k, v, arguments = inputs.q, inputs.k, inputs.v, inputs.arguments

        def call() -> Tensor:
            result: Tensor = function(q, k, v, **arguments)
            return result

        return call

    def as_nhd(self, out: Tensor) -> Tensor:
        return out

    def dtype(self, case: Case, inputs: Inputs) -> torch.dtype:
        return case.dtypes[0]
