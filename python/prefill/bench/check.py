"""Whether a contender's result is right: rows of it against the reference.

Inputs are random normal, so a row's elements are of one size. Rounding the weights to the kernel's
dtype moves an element by a few times that one's unit roundoff of the row's root mean square (errors
of many weights average out), and rounding the output by the output's unit roundoff of itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prefill.api import single_prefill_with_kv_cache
from prefill.bench.cases import Case, Inputs
from prefill.packing import unpack_mask_block
from prefill.reference import Span
from prefill.request import FP8_DTYPES

ROWS = 16
UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-4,  # its kernels round weights to e4m3fn
}


class Checker:
    """Checks the results of several contenders for the same inputs."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self._case = case
        self._inputs = inputs
        self._expected = [(rows, self._reference(rows)) for rows in self._fixed_rows()]
        self._accepted: Tensor | None = None

    def problem(self, out: Tensor, dtype: torch.dtype) -> str:
        """What is wrong with the result [qo_len, heads, head_dim_vo]; "" if nothing.

        `dtype` is what was multiplied in.
        """
        if tuple(out.shape) != self._case.output_shape:
            return f"shape {tuple(out.shape)}, not {self._case.output_shape}"
        rounded_to = UNIT_ROUNDOFF[out.dtype]
        out = computable(out)
        if not bool(out.isfinite().all()):
            return "NaN or infinity in the output"
        expected = list(self._expected)
        if self._accepted is not None and self._any_rows:
            row = _furthest_row(out, self._accepted)
            expected.append((row, self._reference(row)))
        for rows, truth in expected:
            excess = _excess(out[rows.as_slice], truth, UNIT_ROUNDOFF[dtype], rounded_to)
            if not excess <= 1.0:
                return f"rows {rows.start} to {rows.stop - 1}: {excess:.1f} times the tolerance"
        if self._accepted is None:
            self._accepted = out
        return ""

    @property
    def _any_rows(self) -> bool:
        """Whether rows can be cut out anywhere; else only at the end, where pos(i) is the same."""
        arguments = self._inputs.arguments
        by_position = "window_left" in arguments or "pos_encoding_mode" in arguments
        return self._causal or not by_position

    @property
    def _causal(self) -> bool:
        arguments = self._inputs.arguments
        given = "custom_mask" in arguments or "packed_custom_mask" in arguments
        return bool(arguments.get("causal")) and not given

    def _fixed_rows(self) -> list[Span]:
        length = self._case.length.qo
        starts = [length - ROWS]
        if self._any_rows:
            starts += [0, length // 2 - ROWS // 2 + 1]
        spans = (Span(max(0, start), min(length, max(0, start) + ROWS)) for start in starts)
        return list(dict.fromkeys(spans))

    def _reference(self, rows: Span) -> Tensor:
        """Those rows of the truth: with their queries alone and, if causal, no key behind them."""
        x = self._inputs
        arguments: dict[str, Any] = {**x.arguments, "causal": self._causal}
        keys = self._case.length.kv
        if self._causal:
            keys = max(0, keys - (self._case.length.qo - rows.stop))
        if "packed_custom_mask" in arguments:
            packed = arguments.pop("packed_custom_mask")
            arguments["custom_mask"] = unpack_mask_block(
                packed, rows, (0, keys), self._case.length.kv
            )
        elif "custom_mask" in arguments:
            arguments["custom_mask"] = arguments["custom_mask"][rows.as_slice, :keys]
        truth: Tensor = single_prefill_with_kv_cache(
            x.q[rows.as_slice],
            x.k[:keys],
            x.v[:keys],
            backend="reference",
            o_dtype=torch.float32,
            **arguments,
        )
        return truth


def computable(out: Tensor) -> Tensor:
    """The same values in a dtype that torch computes in: bfloat16 holds all of float8."""
    return out.bfloat16() if out.dtype in FP8_DTYPES else out


def _excess(out: Tensor, truth: Tensor, of_weights: float, of_output: float) -> float:
    """The largest error in units of what the unit roundoffs of weights and outputs allow."""
    size = truth.square().mean(-1, keepdim=True).sqrt()
    allowed = 6 * of_weights * size + 2 * of_output * truth.abs() + 1e-30
    return float(((out.float() - truth).abs() / allowed).amax())


def _furthest_row(out: Tensor, other: Tensor) -> Span:
    row = int((out - other).abs().amax((1, 2)).argmax())
    return Span(row, row + 1)
