"""The reference backend: attention as specified, in plain torch, for every argument and device.

It is the oracle that the kernels are measured against, and the backend of CPU tensors, of devices
and builds without kernels, and of lengths of 2^30 and more. Everything is computed in float64:
16-bit and fp8 inputs enter without loss, logits of any size stay exact, and TF32 or other
reduced-precision modes of torch's matmuls cannot apply. Only the results are rounded. So a device
must have float64; on data-centre GPUs that runs at about the float32 rate, elsewhere more slowly.

Memory: the work goes in blocks of at most `_BLOCK_ELEMENTS` logits (or one query row's, if that is
more), a handful of which live at once, so a call of any size needs under 512 MiB beside its
tensors, plus copies of q and k when they are rotated. Block sizes depend on the shapes alone. Keys
that no row of a block can see (causal, window) are not touched.

No step depends on values on the host: nothing synchronises, and a call traces whole under
torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from prefill.packing import unpack_mask_block
from prefill.rope import alibi_slopes, apply_llama_rope

if TYPE_CHECKING:
    from prefill.request import PrefillRequest

# Elements of a block's logits, and the bound for every other temporary: 64 MiB in float64.
_BLOCK_ELEMENTS = 1 << 23
# Query rows per block where rows see different ranges: a block computes the union of these.
_BOUNDED_ROWS = 512
# Keys whose float64 copies are made at a time.
_BLOCK_KEYS = 1 << 13
# One sum counts both kinds of non-finite values: +inf and NaN count 1, -inf and NaN count this.
_NEGATIVE_MARK = float(2 * _BLOCK_KEYS)


class Span(NamedTuple):
    """The half-open range [start, stop) of rows, keys or heads."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    @property
    def as_slice(self) -> slice:
        return slice(self.start, self.stop)

    def split(self, size: int) -> Iterator[Span]:
        for start in range(self.start, self.stop, size):
            yield Span(start, min(start + size, self.stop))


def visible_keys(rows: Span, kv_len: int, offset: int, causal: bool, window_left: int) -> Span:
    """Return the keys that at least one of `rows` sees; a row's position is row + offset."""
    start = max(0, rows.start + offset - window_left) if window_left >= 0 else 0
    stop = min(kv_len, rows.stop + offset) if causal else kv_len
    return Span(start, max(start, stop))


def range_mask(
    rows: Span, keys: Span, offset: int, causal: bool, window_left: int, device: torch.device
) -> Tensor | None:
    """Return bool `[rows, keys]`, True = the row sees the key; None if all rows see all keys."""
    past_is_cut = window_left >= 0 and keys.start < rows.stop - 1 + offset - window_left
    future_is_cut = causal and keys.stop - 1 > rows.start + offset
    if not past_is_cut and not future_is_cut:
        return None
    distance = _distance(rows, keys, offset, device)
    if not past_is_cut:
        return distance <= 0
    if not future_is_cut:
        return distance >= -window_left
    return (distance <= 0) & (distance >= -window_left)


@torch.no_grad()
def reference_attention(request: PrefillRequest) -> tuple[Tensor, Tensor | None]:
    """Compute `request`; return the output and, if asked for, the LSE.

    `out` and `lse` are filled where given. A masked key leaves no trace in a row's results,
    whatever its K and V hold. A visible NaN or infinity in V reaches exactly its own channel of the
    rows that see it. Results carry no gradient.
    """
    r = request
    out, lse = _results(r)
    if r.num_qo_heads == 0:
        return out, lse

    group = r.num_qo_heads // r.num_kv_heads
    offset = r.kv_len - r.qo_len
    q, k, v = r.q, r.k, r.v
    if r.pos_encoding_mode == "ROPE_LLAMA":
        q = apply_llama_rope(q, offset, r.rope_scale, r.rope_theta, r.q.dtype)
        k = apply_llama_rope(k, 0, r.rope_scale, r.rope_theta, r.q.dtype)
    terms = _head_terms(r, group)
    lse_unit = 1.0 / math.log(2.0) if r.lse_base == "2" else 1.0

    # Views whose query head is split into (kv head, member of its group).
    q = _split_heads(q, r.num_kv_heads)
    out_heads = _split_heads(out, r.num_kv_heads)
    lse_heads = None if lse is None else _split_heads(lse, r.num_kv_heads)

    head_dim = max(r.head_dim_qk, r.head_dim_vo)
    for rows in Span(0, r.qo_len).split(_rows_per_block(r, group, head_dim)):
        keys = visible_keys(rows, r.kv_len, offset, r.causal, r.window_left)
        seen = _seen(r, rows, keys, offset)
        distance = None
        if terms.slopes is not None:
            distance = _distance(rows, keys, offset, q.device).to(torch.float64)
        for kv_heads, members in _head_blocks(
            r.num_kv_heads, group, rows.size, keys.size, head_dim
        ):
            query_block = (rows.as_slice, kv_heads.as_slice, members.as_slice)
            key_block = (keys.as_slice, kv_heads.as_slice)
            block_out, block_lse = _attend(
                q[query_block],
                k[key_block],
                v[key_block],
                terms.block(kv_heads, members),
                r.logits_soft_cap,
                distance,
                seen,
            )
            out_heads[query_block] = block_out.permute(2, 0, 1, 3).to(out.dtype)
            if lse_heads is not None:
                lse_heads[query_block] = (block_lse * lse_unit).permute(2, 0, 1).to(torch.float32)
    return out, lse


class _HeadTerms(NamedTuple):
    """What differs between heads: float64 `[kv heads, members, 1, 1]` each."""

    qk_scale: Tensor
    v_scale: Tensor
    slopes: Tensor | None
    sinks: Tensor | None

    def block(self, kv_heads: Span, members: Span) -> _HeadTerms:
        part = (kv_heads.as_slice, members.as_slice)
        return _HeadTerms(
            self.qk_scale[part],
            self.v_scale[part],
            None if self.slopes is None else self.slopes[part],
            None if self.sinks is None else self.sinks[part],
        )


def _results(r: PrefillRequest) -> tuple[Tensor, Tensor | None]:
    out, lse = r.out, r.lse
    if out is None:
        shape = (r.qo_len, r.num_qo_heads, r.head_dim_vo)
        out = torch.empty(shape, dtype=r.o_dtype, device=r.q.device)
    if lse is None and r.return_lse:
        lse = torch.empty((r.qo_len, r.num_qo_heads), dtype=torch.float32, device=r.q.device)
    return out, lse


def _split_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """View `[rows, query heads, ...]` as `[rows, kv heads, members, ...]`."""
    rows, heads, *rest = x.shape
    return x.view(rows, num_kv_heads, heads // num_kv_heads, *rest)


def _head_terms(r: PrefillRequest, group: int) -> _HeadTerms:
    heads = (r.num_kv_heads, group, 1, 1)

    def constant(value: float) -> Tensor:
        return torch.full(heads, value, dtype=torch.float64, device=r.q.device)

    def per_query_head(values: Tensor) -> Tensor:
        return values.to(torch.float64).reshape(heads)

    def per_kv_head(values: Tensor) -> Tensor:
        return values.to(torch.float64).reshape(r.num_kv_heads, 1, 1, 1)

    qk_scale, v_scale = constant(r.sm_scale), constant(r.v_scale)
    if r.scale_q is not None:
        qk_scale = qk_scale * per_query_head(r.scale_q)
    if r.scale_k is not None:
        qk_scale = qk_scale * per_kv_head(r.scale_k)
    if r.scale_v is not None:
        v_scale = v_scale * per_kv_head(r.scale_v)
    slopes = None
    if r.pos_encoding_mode == "ALIBI":
        given = r.alibi_slopes
        rule = alibi_slopes(r.num_qo_heads, r.q.device) if given is None else given
        slopes = per_query_head(rule)
    sinks = None if r.sinks is None else per_query_head(r.sinks)
    return _HeadTerms(qk_scale, v_scale, slopes, sinks)


def _rows_per_block(r: PrefillRequest, group: int, head_dim: int) -> int:
    rows, keys = r.qo_len, r.kv_len
    if r.causal or r.window_left >= 0:
        rows = min(rows, _BOUNDED_ROWS)
    if r.window_left >= 0:
        keys = min(keys, r.window_left + (rows if r.causal else r.qo_len))
    return max(1, min(rows, _BLOCK_ELEMENTS // (group * max(keys, head_dim))))


def _head_blocks(
    num_kv_heads: int, group: int, rows: int, keys: int, head_dim: int
) -> Iterator[tuple[Span, Span]]:
    """Yield (kv heads, members of their groups): several whole groups, or part of one."""
    logits = rows * max(keys, head_dim)
    kv_elements = min(keys, _BLOCK_KEYS) * head_dim
    kv_block = max(1, _BLOCK_ELEMENTS // max(group * logits, kv_elements))
    member_block = min(group, max(1, _BLOCK_ELEMENTS // logits))
    for kv_heads in Span(0, num_kv_heads).split(kv_block):
        for members in Span(0, group).split(member_block):
            yield kv_heads, members


def _distance(rows: Span, keys: Span, offset: int, device: torch.device) -> Tensor:
    """Return key position minus row position, int64 `[rows, keys]`."""
    row_position = torch.arange(rows.start + offset, rows.stop + offset, device=device)
    key_position = torch.arange(keys.start, keys.stop, device=device)
    return key_position[None, :] - row_position[:, None]


def _seen(r: PrefillRequest, rows: Span, keys: Span, offset: int) -> Tensor | None:
    """Return bool `[rows, keys]`: range and mask together; None if every row sees every key."""
    in_range = range_mask(rows, keys, offset, r.causal, r.window_left, r.q.device)
    if r.packed_custom_mask is not None:
        kept = unpack_mask_block(r.packed_custom_mask, rows, keys, r.kv_len)
    elif r.custom_mask is not None:
        kept = r.custom_mask[rows.as_slice, keys.as_slice]
    else:
        return in_range
    return kept if in_range is None else kept & in_range


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: _HeadTerms,
    soft_cap: float,
    distance: Tensor | None,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend one block: q `[rows, kv heads, members, dim]`, k and v `[keys, kv heads, dim]`.

    Returns, in float64, the output `[kv heads, members, rows, dim]` and the natural LSE `[kv heads,
    members, rows]`.
    """
    logits = _logits(q, k, terms.qk_scale)
    if soft_cap > 0.0:
        logits = logits.div_(soft_cap).tanh_().mul_(soft_cap)
    if terms.slopes is not None and distance is not None:
        logits = logits.addcmul_(terms.slopes, distance)
    if seen is not None:
        logits = logits.masked_fill_(~seen, -torch.inf)

    peak = _row_maximum(logits)
    empty = peak == -torch.inf
    if terms.sinks is not None:
        peak = torch.maximum(peak, terms.sinks)
    # Only a finite peak can be subtracted. Without one the row is empty, or holds +inf or NaN,
    # which then show.
    shift = torch.where(peak.isfinite(), peak, 0.0)
    weights = logits.sub_(shift).exp_()
    total = weights.sum(-1, keepdim=True)
    if terms.sinks is not None:
        total = total + torch.exp(terms.sinks - shift)

    values, traces = _weigh_values(weights, v, seen)
    out = torch.where(empty, 0.0, (values / total + traces) * terms.v_scale)
    return out, (shift + total.log()).squeeze(-1)


def _logits(q: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Return `scale * q . k`, `[kv heads, members, rows, keys]`.

    The product is scaled, not q, whose rounding would tell equal products apart: at a scale of 1e30
    by far more than a softmax overlooks.
    """
    queries = q.to(torch.float64).permute(1, 2, 0, 3)
    stacked = queries.flatten(1, 2)
    every_key = Span(0, k.shape[0])

    def against(keys: Span) -> Tensor:
        return torch.matmul(stacked, k[keys.as_slice].to(torch.float64).permute(1, 2, 0))

    if every_key.size <= _BLOCK_KEYS:
        logits = against(every_key)
    else:
        logits = queries.new_empty((*stacked.shape[:2], every_key.size))
        for keys in every_key.split(_BLOCK_KEYS):
            logits[..., keys.as_slice] = against(keys)
    return logits.view(*queries.shape[:3], every_key.size).mul_(scale)


def _row_maximum(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 0:
        return logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    return logits.amax(-1, keepdim=True)


def _weigh_values(weights: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `weights @ v` over the finite values, and the traces of the others.

    A trace is 0, +-inf or NaN per row and channel. Apart, because 0 * inf and 0 * NaN are NaN: a
    product with the weights alone would spread what masked keys hold.
    """
    kv_heads, members, rows, _ = weights.shape
    stacked = weights.flatten(1, 2)
    sums = weights.new_zeros((kv_heads, members * rows, v.shape[-1]))
    traces = weights.new_zeros((kv_heads, rows if seen is not None else 1, v.shape[-1]))
    for keys in Span(0, v.shape[0]).split(_BLOCK_KEYS):
        values = v[keys.as_slice].to(torch.float32).transpose(0, 1)
        # Comparisons with NaN are false: NaN counts as both infinities, and their sum is NaN.
        marks = torch.where(values < torch.inf, 0.0, 1.0)
        marks += torch.where(values > -torch.inf, 0.0, _NEGATIVE_MARK)
        finite = values.nan_to_num(0.0, 0.0, 0.0).to(torch.float64)
        sums += torch.matmul(stacked[..., keys.as_slice], finite)
        if seen is None:
            counts = marks.sum(1, keepdim=True, dtype=torch.float64)
        else:
            visible = seen[:, keys.as_slice].to(torch.float64)
            counts = torch.matmul(visible, marks.to(torch.float64))
        traces += torch.where(counts % _NEGATIVE_MARK > 0.0, torch.inf, 0.0)
        traces += torch.where(counts >= _NEGATIVE_MARK, -torch.inf, 0.0)
    return sums.view(kv_heads, members, rows, -1), traces.unsqueeze(1)
