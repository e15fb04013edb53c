"""What a kernel's result is held against, and how far off it may be.

The truth is computed in float64. A kernel may be off by

1. elementwise, what arithmetic in 16 bits costs at worst: with u half the dtype's epsilon, the
   weights round to 16 bits (u * sum_j p_j |v_j|) and the output to its dtype (u * |out|); in
   float16 weights under 2^-14 are subnormal and lose up to 2^-25 each; a logit of size m, computed
   in float32, is off by some 2^-21 * m, and a weight relatively by twice that;
2. and, over all elements of one result, twice the largest error of the plain computation: logits
   and softmax in float32, weights rounded to 16 bits, the product with v accumulated in float32,
   the output rounded. That is far less than 1 for long rows, whose roundings average out. For few
   elements the largest error is a matter of luck, so this holds from `ENOUGH` elements on, and a
   quarter of the output's own rounding is allowed on top, or an eighth of the weights' where the
   output has more bits.

float8 queries are computed in 16 bits: those of a 16-bit output, else float16. Not so where fa3 has
a kernel that multiplies in float8: weights round to e4m3fn then, the plain computation is that of
`float8_scheme`, and what it says that 8-bit sums may lose is allowed in logits, LSE and output.
Twice the plain error is no less than what these sums move.

Rotated q and k are rounded to q's dtype. A kernel rotates in float32, off by 2^-22 of the size of a
pair: of a few thousand values one lies so near the middle of two neighbours that it may become the
other one. What these few could move is allowed for.

A bias and a logit add up to a float32, off by 2^-24 of itself. Beside logits of 1e5 that is more
than 16 bits cost and parts keys of equal score, which few rows have at their maximum: what the
plain computation makes of these is luck again, however many elements a row has. Twice the plain
error is therefore no less than what 2^-24 moves. (Without a bias equal scores stay equal.)

A soft cap costs kernels more: their tanh is fitted. Up to 0.635 of the cap it is right to 2^-16.2
of itself, above to 2^-18.5 (`tanh_of`, `SmallCap` in csrc/common/logits.cuh, with the rounding of
every step and the 2^-23 that PTX allows rcp.approx). A capped logit may be off by 15 % more than
that, for what errors of weights have beside their linear part. From logits of some 30 on that is
more than weights of float16 are off by: twice the plain error is no less than what it moves. The
reference has no such allowances.

Weights that float32 flushes count 2^-126 each: all of a row may be such with a sink, and those that
meet no zero in v without. An output below 2^-126 is subnormal: in bfloat16 it rounds by 2^-134.

A row that sees a NaN key has NaN for output and LSE, and no other row has.

The LSE comes from float32 sums of float32 exponentials: log2 of those is right to about 1e-6, plus
the logits' own 2^-21 of their size; 1e-3 * (1 + 2^-10 * |lse|) is well above both and well below
any mistake (one key too many among 700 moves it by 2e-3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import float8_scheme
from prefill.request import FP8_DTYPES

ENOUGH = 2048
BIAS_ERROR = 2.0**-24
"""By how much of itself a logit is off that a bias was added to in float32."""
CAP_ERRORS = (2.0**-16, 2.0**-18.3)
"""By how much of itself a kernel's capped logit may be off, up to 0.64 of the cap and above."""
MOST_CHANGE = 50.0
"""A logit that may be off by so much says nothing of its row."""
LOG2_E = 1.0 / math.log(2.0)


@dataclass
class Expected:
    """The truth about a call and what a kernel may be off by; rows can be cut from its end."""

    out: Tensor
    lse: Tensor
    plain_error: Tensor
    worst: Tensor
    lse_moved: Tensor
    unit: float
    """Half the epsilon of the output's dtype."""

    def last_rows(self, count: int) -> Expected:
        cut = slice(self.out.shape[0] - count, None)
        parts = (self.out, self.lse, self.plain_error, self.worst, self.lse_moved)
        return Expected(*(part[cut] for part in parts), self.unit)


@dataclass
class Ledger:
    """Collects figures on the device and compares them with their bounds in one go."""

    labels: list[str] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    bounds: list[Tensor] = field(default_factory=list)

    def at_most(self, label: str, value: Tensor, bound: Tensor | float) -> None:
        self.labels.append(label)
        self.values.append(value.double())
        if not isinstance(bound, Tensor):
            bound = torch.full((), bound, device=value.device)
        self.bounds.append(bound.double())

    def none(self, label: str, wrong: Tensor) -> None:
        """No element of the bool tensor is True."""
        self.at_most(label, wrong.sum(), 0.0)

    def result(
        self,
        label: str,
        out: Tensor,
        lse: Tensor | None,
        expected: Expected,
        few: Tensor | None = None,
    ) -> None:
        """`out` and `lse` are what `expected` allows.

        `few` are elements of `out` in which one product dwarfs the others. Their largest error is
        luck: they are held to their own bounds alone.
        """
        nan = expected.out.isnan()
        self.none(f"{label}: NaN in out", out.isnan() != nan)
        error = (out.double() - expected.out).abs().masked_fill(nan, 0.0)
        beyond = (error - expected.worst).masked_fill(nan, 0.0)
        self.at_most(f"{label}: out beyond its arithmetic", beyond.amax(), 0.0)
        if out.numel() >= ENOUGH:
            apart = nan if few is None else nan | few
            floor = expected.unit / 4 * expected.out.masked_fill(apart, 0.0).abs().amax()
            bound = 2 * expected.plain_error.masked_fill(apart, 0.0).amax() + floor
            largest = error.masked_fill(apart, 0.0).amax()
            self.at_most(f"{label}: out against twice the plain error", largest, bound)
        if lse is None:
            return
        nan = expected.lse.isnan()
        self.none(f"{label}: NaN in LSE", lse.isnan() != nan)
        empty = expected.lse == -math.inf
        self.none(f"{label}: rows without keys, LSE", (lse == -math.inf) != empty)
        self.none(f"{label}: rows without keys, out", (out != 0) & empty[..., None])
        allowed = 1e-3 * (1 + expected.lse.abs() * 2.0**-10) + expected.lse_moved
        ratio = (lse.double() - expected.lse).abs() / allowed
        self.at_most(f"{label}: LSE", ratio.masked_fill(empty | nan, 0.0).amax(), 1.0)

    def finish(self) -> None:
        values, bounds = torch.stack(self.values).cpu(), torch.stack(self.bounds).cpu()
        wrong = (~(values <= bounds)).nonzero().flatten().tolist()
        texts = [f"{self.labels[i]}: {values[i]:.3e} > {bounds[i]:.3e}" for i in wrong[:8]]
        assert not wrong, f"{len(wrong)} of {len(values)} figures are too large:\n" + "\n".join(
            texts
        )


def visible(
    qo_len: int, kv_len: int, causal: bool, window_left: int, device: torch.device | str
) -> Tensor:
    """Bool [qo_len, kv_len]."""
    position = torch.arange(qo_len, device=device)[:, None] + (kv_len - qo_len)
    key = torch.arange(kv_len, device=device)
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    return seen


def _per_head(scale: Any, heads: int, group: int, device: torch.device) -> Tensor:
    """float64 [heads * group, 1, 1]"""
    tensor = torch.as_tensor(1.0 if scale is None else scale, device=device).double()
    return tensor.expand(heads).repeat_interleave(group)[:, None, None]


def slopes_by_rule(heads: int, device: torch.device) -> Tensor:
    """ALiBi: powers of 2^(-8/n) for the first n heads, then every second one of 2n heads."""
    n = 2 ** int(math.log2(heads + 0.5))
    exponents = [-8 * (h + 1) / n if h < n else -4 * (2 * (h - n) + 1) / n for h in range(heads)]
    return torch.tensor([2.0**exponent for exponent in exponents], device=device)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values of `dtype`; past the range of a float8 its largest."""
    if dtype in FP8_DTYPES:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype).double()


def rotated(
    x: Tensor, first_position: int, rope_scale: float, rope_theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """ROPE_LLAMA, rounded to `dtype`, and by how much what float32 makes of it may differ."""
    position = first_position + torch.arange(x.shape[0], dtype=torch.float64, device=x.device)
    exponent = torch.arange(0, x.shape[2], 2, dtype=torch.float64, device=x.device) / x.shape[2]
    angle = (position / rope_scale)[:, None, None] * rope_theta**-exponent
    first, second = x.double().chunk(2, -1)
    turned = torch.cat(
        (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ),
        -1,
    )
    error = ((first.abs() + second.abs()) * 2.0**-22).repeat(1, 1, 2)
    low, high = (rounded(turned + change, dtype) for change in (-error, error))
    return rounded(turned, dtype), high - low


def expect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    custom_mask: Tensor | None = None,
    logits_soft_cap: float | None = None,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lse_base: str = "2",
    sm_scale: float | None = None,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    o_dtype: torch.dtype | None = None,
    first_key: int = 0,
    of_kernel: bool = True,
    native: bool = False,
) -> Expected:
    """The truth for NHD tensors, and the plain computation's error.

    Keys that no row sees may be left out at the beginning: `first_key` of them. `of_kernel` is
    False for a result of the reference, `native` True for one of a kernel that multiplies in
    float8 (`float8_scheme.is_native`).
    """
    turned = pos_encoding_mode == "ROPE_LLAMA"
    natural = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    o_dtype = natural if o_dtype is None else o_dtype
    kind_of_weights = natural
    if q.dtype in FP8_DTYPES and o_dtype != torch.bfloat16:
        kind_of_weights = torch.float16
    if turned:
        turn = (rope_scale or 1.0, rope_theta or 1e4, q.dtype)
        q, q_change = rotated(q, first_key + k.shape[0] - q.shape[0], *turn)
        k, k_change = rotated(k, first_key, *turn)
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    device = q.device
    scale = (
        (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
        * _per_head(scale_q, heads, 1, device)
        * _per_head(scale_k, kv_heads, group, device)
        * _per_head(k_scale, heads, 1, device)
    )
    values_scale = _per_head(scale_v, kv_heads, group, device) * _per_head(
        v_scale, heads, 1, device
    )
    seen = visible(q.shape[0], k.shape[0], causal, window_left, device)
    if custom_mask is not None:
        seen &= custom_mask
    bias = torch.zeros((), dtype=torch.float64, device=device)
    if pos_encoding_mode == "ALIBI":
        slopes = slopes_by_rule(heads, device) if alibi_slopes is None else alibi_slopes
        position = torch.arange(q.shape[0], device=device)[:, None] + (k.shape[0] - q.shape[0])
        distance = torch.arange(k.shape[0], device=device) - position
        bias = slopes.double()[:, None, None] * distance
    sink = torch.full((heads,), -math.inf, device=device) if sinks is None else sinks
    sink = sink.double()[:, None, None].expand(heads, q.shape[0], 1)

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)

    queries, keys, values = by_head(q), by_head(k), by_head(v)
    capped = logits_soft_cap is not None and logits_soft_cap > 0.0

    def computed(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        logits = queries.to(kind) @ keys.to(kind).transpose(1, 2) * scale.to(kind)
        if capped:
            logits = torch.tanh(logits / logits_soft_cap) * logits_soft_cap
        logits = (logits + bias.to(kind)).masked_fill(~seen, -math.inf)
        logits = torch.cat((logits, sink.to(kind)), -1)
        empty = (logits == -math.inf).all(-1, keepdim=True)
        return logits, torch.softmax(logits, -1)[..., :-1].masked_fill(empty, 0.0)

    def product(weights: Tensor, kind: torch.dtype) -> Tensor:
        return (weights.to(kind) @ values.to(kind) * values_scale.to(kind)).transpose(0, 1)

    logits, weights = computed(torch.float64)
    out = product(weights, torch.float64)
    lse = torch.logsumexp(logits, -1).transpose(0, 1)
    if lse_base == "2":
        lse = lse * LOG2_E
    plain_logits, plain_weights = computed(torch.float32)
    unit, o_unit = (torch.finfo(dtype).eps / 2 for dtype in (kind_of_weights, o_dtype))
    if native:
        unit = float8_scheme.UNIT
        *scores, sinks_of_rows = plain_logits.split((k.shape[0], 1), -1)
        summed = float8_scheme.attend(*scores, values.float(), sinks_of_rows)
        plain = (summed.nan_to_num(0.0) * values_scale.float()).transpose(0, 1).to(o_dtype)
    else:
        plain = product(plain_weights.to(kind_of_weights), torch.float32).to(o_dtype)

    size = (weights @ values.double().abs() * values_scale.abs()).transpose(0, 1)
    counts = torch.cat((seen.expand(heads, -1, -1), sink > -math.inf), -1)
    largest = logits.masked_fill(~counts, 0.0).abs().amax(-1).transpose(0, 1)[..., None]
    worst = 1.01 * (unit * size + o_unit * out.abs()) + (2.0**-20 * largest + 2.0**-18) * size
    value_sum = k.shape[0] * values.double().abs().amax((1, 2)) * values_scale.abs()[:, 0, 0]
    if kind_of_weights == torch.float16:
        worst = worst + 2.0**-25 * value_sum[None, :, None]
    if o_dtype == torch.float16:
        worst = worst + 2.0**-25
    worst = worst + (2.0**-126 * value_sum[None, :, None] + 2.0**-134)
    worst = torch.where(seen.any(-1)[:, None, None], worst, 0.0)  # without keys exactly zero
    plain_error = (plain.double() - out).abs()
    lse_moved = torch.zeros_like(lse)

    def moved_by(change: Tensor) -> tuple[Tensor, Tensor]:
        """What logits that are off by up to `change` [heads, rows, keys] do to output and LSE.

        Each weight comes out times exp(-change) to exp(change), over the sum of them: of a float8
        key whose rotation lies between two values that is far from linear.
        """
        change = change.masked_fill(~seen, 0.0)
        change = change.clamp(max=MOST_CHANGE)
        others = (1.0 - weights.sum(-1, keepdim=True)).clamp(min=0.0)  # a sink's share
        least_sum = others + (weights * (-change).exp()).sum(-1, keepdim=True)  # it was 1
        moved = weights * change.expm1() / least_sum
        sums = moved.sum(-1).transpose(0, 1)
        moved_out = (moved @ values.double().abs() * values_scale.abs()).transpose(0, 1)
        return moved_out + sums[..., None] * out.abs(), 1.1 * LOG2_E * sums

    if turned:
        change = (
            by_head(q_change) @ keys.double().abs().mT
            + queries.double().abs() @ by_head(k_change).mT
        )
        moved_out, lse_moved = moved_by(change * scale.abs())
        worst, plain_error = worst + moved_out, plain_error + moved_out
    if pos_encoding_mode == "ALIBI":
        moved_out, _ = moved_by(BIAS_ERROR * logits[..., :-1].abs())
        plain_error = torch.fmax(plain_error, moved_out / 2)  # which is NaN beside infinities
    if native:
        change = float8_scheme.cut(queries, keys) * scale.abs()
        moved_out, moved_lse = moved_by(change)
        highest = logits[..., :-1].masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
        of_largest = (highest - torch.logsumexp(logits, -1, keepdim=True)).exp().nan_to_num(0.0)
        seen_size = seen.double() @ values.double().abs() * values_scale.abs()
        subnormal = (float8_scheme.LEAST * of_largest * seen_size).transpose(0, 1)
        moved_out = moved_out + float8_scheme.OF_SUMS * size
        worst, lse_moved = worst + moved_out + subnormal, lse_moved + moved_lse
        plain_error = torch.fmax(plain_error, moved_out / 2)
    if capped and of_kernel:
        of_cap = (logits[..., :-1] - bias).abs()
        moved_out, moved_lse = moved_by(
            of_cap * torch.where(of_cap < 0.64 * logits_soft_cap, *CAP_ERRORS)
        )
        worst, lse_moved = worst + moved_out, lse_moved + moved_lse
        plain_error = torch.fmax(plain_error, moved_out / 2)
    return Expected(
        out, lse, plain_error, worst, lse_moved, o_unit if native else max(o_unit, unit / 2)
    )


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed * 7919 + math.prod(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def inputs(
    qo_len: int,
    kv_len: int,
    head_dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float16,
    heads: tuple[int, int] = (4, 2),
    kv_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v."""
    k_dtype, v_dtype = (dtype, dtype) if kv_dtypes is None else kv_dtypes
    return (
        normal(qo_len, heads[0], head_dims[0], dtype=dtype),
        normal(kv_len, heads[1], head_dims[0], dtype=k_dtype, seed=1),
        normal(kv_len, heads[1], head_dims[1], dtype=v_dtype, seed=2),
    )


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether two results, (out, lse), have the same bits, on whatever devices."""
    return all(torch.equal(a, b.to(a.device)) for a, b in zip(one, other, strict=True))


def guarded(*shape: int, dtype: torch.dtype, rows: int = 16) -> tuple[Tensor, Tensor]:
    """A NaN-filled buffer and a view of it in the middle, for a result."""
    buffer = torch.full((shape[0] + 2 * rows, *shape[1:]), math.nan, dtype=dtype, device="cuda")
    return buffer, buffer[rows : rows + shape[0]]


def poisoned(tensor: Tensor, rows: int = 160, columns: int = 8) -> Tensor:
    """The same values, amid NaN: rows after the last, columns after the head dim."""
    length, heads, head_dim = tensor.shape
    shape = (length + rows, heads, head_dim + columns)
    buffer = torch.full(shape, math.nan, dtype=tensor.dtype, device=tensor.device)
    buffer[:length, :, :head_dim] = tensor
    return buffer[:length, :, :head_dim]
