"""This package's own backends."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from prefill.api import explain, single_prefill_with_kv_cache
from prefill.bench.cases import Case, Inputs
from prefill.bench.contenders.contender import Call


class Ours:
    """A forced backend of this package, into an output that is already there."""

    def __init__(self, backend: str) -> None:
        self.name = backend

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        out = torch.empty(case.output_shape, dtype=case.o_dtype, device=inputs.q.device)
        q, k, v, arguments, backend = inputs.q, inputs.k, inputs.v, inputs.arguments, self.name

        def call() -> Tensor:
            result: Tensor = single_prefill_with_kv_cache(
                q, k, v, backend=backend, out=out, **arguments
            )
            return result

        return call

    def as_nhd(self, out: Tensor) -> Tensor:
        return out

    def dtype(self, case: Case, inputs: Inputs) -> torch.dtype:
        """float8 is widened where no kernel multiplies in it; `explain` knows."""
        told = explain(inputs.q, inputs.k, inputs.v, backend=self.name, **inputs.arguments)
        return case.dtype if told.dtype is None else getattr(torch, told.dtype)
