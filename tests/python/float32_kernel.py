"""A stand-in that rounds where kernels do, for tests of what `exactness` allows.

Products, logits, softmax and sums in float32; weights relative to the largest score, in powers of
two, flushed below 2^-126 and rounded to 16 bits for the product with v; a tanh as far off as
the fitted one may be. Where fa3 has a kernel that multiplies in float8: sums that are cut, tile by
tile, and weights of e4m3fn (`float8_scheme`). So what fails with it may fail on a GPU for no fault.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exactness import CAP_ERRORS, LOG2_E
from fakes import StubKernel
from float8_scheme import LARGEST, cut_product, e4m3
from prefill import support
from prefill.request import FP8_DTYPES
from prefill.rope import alibi_slopes as alibi_rule
from prefill.rope import apply_llama_rope

LEAST_NORMAL = 2.0**-126


class Float32Kernel(StubKernel):
    """`prefill::attention` as a kernel computes it; keeps no calls."""

    tanh_error = 0.85
    """Of what a fitted tanh may be off by."""
    tile = 96
    """Keys; not those of `float8_scheme`."""

    def __call__(
        self,
        backend: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale_q: Tensor | None,
        scale_k: Tensor | None,
        scale_v: Tensor | None,
        mask: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        window_left: int,
        window_right: int,
        alibi: bool,
        rope: bool,
        rope_scale: float,
        rope_theta: float,
        soft_cap: float,
        sm_scale: float,
        v_scale: float,
        lse_scale: float,
        num_splits: int,
    ) -> None:
        if rope:
            q, k = (
                apply_llama_rope(x, first, rope_scale, rope_theta, q.dtype)
                for x, first in ((q, k.shape[0] - q.shape[0]), (k, 0))
            )
        half = q.dtype
        native = multiplies_in_float8(backend, q, k, v, rope)
        if half in FP8_DTYPES:
            half = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float16
        heads, group = q.shape[1], q.shape[1] // k.shape[1]

        def per_head(scale: Tensor | None, repeats: int) -> Tensor:
            ones = torch.ones(heads // repeats)
            return (ones if scale is None else scale).repeat_interleave(repeats)[:, None, None]

        def by_head(x: Tensor) -> Tensor:
            return x.float().transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)

        distance = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None]
        distance = distance - (k.shape[0] - q.shape[0])
        seen = visible(distance, window_left, window_right, mask)
        product = self.product if native else torch.matmul
        scores = product(by_head(q), by_head(k).mT)
        scale = (sm_scale * per_head(scale_q, 1) * per_head(scale_k, group)).float()
        if alibi or soft_cap > 0.0:
            scores, scale = scores * scale, torch.ones(heads, 1, 1)
            if soft_cap > 0.0:
                scores = fitted_tanh(scores / soft_cap, self.tanh_error) * soft_cap
            if alibi:
                slopes = alibi_rule(heads) if alibi_slopes is None else alibi_slopes
                scores = scores + slopes[:, None, None] * distance
        factor, multiplier = factor_and_multiplier(scale)
        scores = (scores * factor).masked_fill(~seen, -math.inf)
        largest = scores.amax(-1, keepdim=True)
        empty = largest == -math.inf
        largest = largest.masked_fill(empty, 0.0)
        if native:
            sums = self.sums_by_tile(scores, multiplier, by_head(v))
        weights = torch.exp2((scores - largest) * multiplier).masked_fill(~seen, 0.0)
        weights = weights.masked_fill((weights < LEAST_NORMAL), 0.0)
        total = weights.sum(-1, keepdim=True)
        if not native:
            sums = self.rounded(weights, half) @ by_head(v)
        largest = largest * multiplier
        if sinks is not None:
            sink = sinks.float()[:, None, None] * LOG2_E
            highest = torch.maximum(largest.masked_fill(empty, -math.inf), sink)
            highest = highest.masked_fill(highest == -math.inf, 0.0)
            share = torch.exp2(largest - highest).masked_fill(empty, 0.0)
            total = total * share + torch.exp2(sink - highest)
            result = sums * share / total
            empty_lse, largest = total == 0, highest
        else:
            result = sums / total
            empty_lse = empty
        result = (result * per_head(scale_v, group) * v_scale).masked_fill(empty, 0.0)
        out.copy_(result.transpose(0, 1))
        if lse is not None:
            base_2 = (largest + torch.log2(total)).masked_fill(empty_lse, -math.inf)
            lse.copy_((base_2 * lse_scale)[..., 0].t())

    def rounded(self, weights: Tensor, half: torch.dtype) -> Tensor:
        return weights.to(half).float()

    def sums_by_tile(self, scores: Tensor, multiplier: Tensor, values: Tensor) -> Tensor:
        """Weights times values, relative to the largest score of all; -inf is not seen."""
        heads, rows, keys = scores.shape
        largest = scores.new_full((heads, rows, 1), -math.inf)
        out = scores.new_zeros(heads, rows, values.shape[-1])
        for first in reversed(range(0, keys, self.tile)):
            tile = slice(first, first + self.tile)
            part = scores[..., tile]
            before, largest = largest, torch.maximum(largest, part.amax(-1, keepdim=True))
            anchor = largest.masked_fill(largest == -math.inf, 0.0)
            growth, weights = (torch.exp2((x - anchor) * multiplier) for x in (before, part))
            out = out * growth + self.product(self.in_e4m3(weights), values[:, tile])
        return out / LARGEST

    def in_e4m3(self, weights: Tensor) -> Tensor:
        return e4m3(weights * LARGEST)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return cut_product(a, b)


def multiplies_in_float8(backend: str, q: Tensor, k: Tensor, v: Tensor, rope: bool) -> bool:
    """The op's rule, by what it is given."""

    def has_rows(x: Tensor) -> bool:
        by_16 = (x.shape[dim] == 1 or x.stride(dim) % 16 == 0 for dim in (0, 1))
        return x.shape[2] % 16 == 0 and all(by_16)

    alike = q.dtype in FP8_DTYPES and q.dtype == k.dtype == v.dtype
    wide = max(q.shape[2], v.shape[2]) > 64
    there = alike and wide and support.has_kernel(backend, q.dtype, q.shape[2], v.shape[2])
    return there and backend == "fa3" and not rope and all(map(has_rows, (q, k, v)))


def factor_and_multiplier(scale: Tensor) -> tuple[Tensor, Tensor]:
    """What scores are multiplied by before the mask, and after the maximum: that is above 0."""
    largest = torch.finfo(torch.float32).max
    apart = (scale == 0) | ~scale.isfinite()
    factor = torch.where(apart, scale, torch.where(scale < 0, -1.0, 1.0))
    return factor, (scale.abs() * LOG2_E).clamp(max=largest).masked_fill(apart, 1.0)


def fitted_tanh(x: Tensor, share: float) -> Tensor:
    """Off by that share of what may be, one way or the other by the last bit of x."""
    bit = x.contiguous().view(torch.int32) & 1
    size = torch.tanh(x)
    error = torch.where(size.abs() < 0.64, *(share * error for error in CAP_ERRORS))
    return size * (1 + error * (2 * bit - 1))


def visible(distance: Tensor, window_left: int, window_right: int, mask: Tensor | None) -> Tensor:
    """Bool [qo_len, kv_len], of keys that are so far to the right of their rows."""
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window_left >= 0:
        seen &= distance >= -window_left
    if window_right >= 0:
        seen &= distance <= window_right
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return seen & mask
    bit = torch.arange(distance.numel())
    return seen & ((mask[bit // 8] >> (bit % 8)) & 1).bool().view(distance.shape)
