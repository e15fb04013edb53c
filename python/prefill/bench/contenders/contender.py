"""What a contender is, and how one is tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from prefill.bench.cases import Case, Inputs

Call = Callable[[], Tensor]


class Contender(Protocol):
    """One implementation."""

    @property
    def name(self) -> str: ...

    def context(self) -> AbstractContextManager[Any]:
        """What must be entered around its calls; costs nothing inside it."""
        ...

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        """A call that does the work and nothing else; raises where it cannot be."""
        ...

    def as_nhd(self, out: Tensor) -> Tensor:
        """The call's result as [qo_len, num_qo_heads, head_dim_vo], a view."""
        ...

    def dtype(self, case: Case, inputs: Inputs) -> torch.dtype:
        """What such a call multiplies in."""
        ...


def attempt(contender: Contender, function: Callable[[], Any]) -> tuple[Any, str]:
    """The function's result inside the contender's context, and "", or None and why not.

    SDPA tells why a backend cannot run in warnings, and raises an error without a reason.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with contender.context():
                return function(), ""
        except Exception as error:
            told = dict.fromkeys(_first_line(str(warning.message)) for warning in caught)
            text = f"{type(error).__name__}: {_first_line(str(error))}"
            return None, "; ".join([text, *told])


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].partition(" (Triggered internally")[0] if lines else ""
