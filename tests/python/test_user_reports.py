"""The checks of `user_reports` on the reference, and on the way to kernels, with a stand-in there.

And the checks themselves: with a fault put into what computes, the check that is for it fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import StubKernel, pretend
from prefill import ops, request
from prefill.reference import reference_attention
from prefill.request import PrefillRequest
from user_reports import REPORTS, Run


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.mark.parametrize("backend", ["reference", "fa2", "fa3"])
@pytest.mark.parametrize("report", REPORTS)
def test_report(report: str, backend: str) -> None:
    REPORTS[report](Run(backend, "cpu"))


# Faults as they were reported: what becomes of the request of a call, or of its results.
def later_window(r: PrefillRequest) -> PrefillRequest:
    return r._replace(window_left=r.window_left - 1) if r.window_left > 0 else r


def one_slope_rule(r: PrefillRequest) -> PrefillRequest:
    if r.pos_encoding_mode != "ALIBI":
        return r
    heads = torch.arange(1, r.num_qo_heads + 1, device=r.q.device)
    return r._replace(alibi_slopes=2.0 ** (-8.0 * heads / r.num_qo_heads))


def rank_0_slopes(r: PrefillRequest) -> PrefillRequest:
    return r._replace(alibi_slopes=None)


def no_scale_k(r: PrefillRequest) -> PrefillRequest:
    return r._replace(scale_k=None)


def scaled_cap(r: PrefillRequest) -> PrefillRequest:
    return r._replace(logits_soft_cap=r.logits_soft_cap * 2)


def no_rope_scale(r: PrefillRequest) -> PrefillRequest:
    return r._replace(rope_scale=1.0)


def causal_beside_a_mask(r: PrefillRequest) -> PrefillRequest:
    return r._replace(causal=r.causal or r.custom_mask is not None)


def rows_of_whole_bytes(r: PrefillRequest) -> PrefillRequest:
    """Mask rows as if padded to bytes."""
    if r.packed_custom_mask is None:
        return r
    row, key = torch.arange(r.qo_len)[:, None], torch.arange(r.kv_len)
    bit = row * (-(-r.kv_len // 8) * 8) + key
    bit = bit.clamp(max=r.packed_custom_mask.numel() * 8 - 1)
    mask = (r.packed_custom_mask[bit // 8] >> (bit % 8) & 1).bool()
    return r._replace(packed_custom_mask=None, custom_mask=mask)


def heads_by_power_of_two(r: PrefillRequest) -> PrefillRequest:
    """A group of 7 divided as if it were one of 8."""
    group = r.num_qo_heads // r.num_kv_heads
    if group & (group - 1) == 0 or r.num_kv_heads == 1:
        return r
    wrong = torch.arange(r.num_qo_heads) // (1 << group.bit_length())
    return r._replace(
        k=r.k[:, wrong], v=r.v[:, wrong], num_kv_heads=r.num_qo_heads, scale_k=None, scale_v=None
    )


def key_past_the_end(r: PrefillRequest) -> PrefillRequest:
    """A row of values too far."""
    if r.kv_len in (0, r.v.untyped_storage().nbytes() // r.v[0].nbytes):
        return r
    offset = r.v.storage_offset() + r.v.stride(0)
    return r._replace(v=r.v.as_strided(r.v.shape, r.v.stride(), offset))


def strides_of_size_1(r: PrefillRequest) -> PrefillRequest:
    """Rows of stride 1 where there is one row: what a TMA descriptor would refuse."""
    if r.qo_len == 1 and r.q.stride(0) % 8:
        raise RuntimeError("cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE")
    return r


def finite_lse(r: PrefillRequest, out: Tensor, lse: Tensor | None) -> None:
    if lse is not None:
        lse.clamp_(min=-49_994.0)


def zeros_below_a_sentinel(r: PrefillRequest, out: Tensor, lse: Tensor | None) -> None:
    if lse is not None:
        out[lse < -50_000.0] = 0.0


def natural_lse(r: PrefillRequest, out: Tensor, lse: Tensor | None) -> None:
    if lse is not None and r.lse_base == "2":
        lse.mul_(math.log(2.0))


def nan_of_empty_rows(r: PrefillRequest, out: Tensor, lse: Tensor | None) -> None:
    if lse is not None:
        out[lse == -math.inf] = math.nan


def out_with_the_strides_of_q(r: PrefillRequest, out: Tensor, lse: Tensor | None) -> None:
    """Written by the strides of q, as far as they stay within."""
    if r.q.stride() != out.stride() and r.out is not None:
        out.copy_(out.flatten().roll(1).view(out.shape))


REQUEST_FAULTS: list[tuple[Callable[[PrefillRequest], PrefillRequest], str]] = [
    (later_window, "transformers39408_the_window_includes_its_edge"),
    (one_slope_rule, "fi200_slopes_of_any_number_of_heads"),
    (rank_0_slopes, "fi1606_a_rank_gives_its_own_slopes"),
    (no_scale_k, "vl51363_each_scale_alone"),
    (scaled_cap, "fi1193_a_cap_of_large_logits"),
    (no_rope_scale, "fi746_the_documented_rotation"),
    (causal_beside_a_mask, "fi1489_a_mask_takes_the_place_of_causal"),
    (rows_of_whole_bytes, "xf813_rows_of_any_number_of_bits"),
    (heads_by_power_of_two, "fi1148_groups_on_the_diagonal"),
    (key_past_the_end, "fi941_fa1745_memory_past_the_keys"),
    (strides_of_size_1, "fi2150_dims_of_size_1_with_any_stride"),
]
RESULT_FAULTS: list[tuple[Callable[[PrefillRequest, Tensor, Tensor | None], None], str]] = [
    (finite_lse, "fi4452_rows_before_the_first_key"),
    (zeros_below_a_sentinel, "fi4267_logits_below_any_sentinel"),
    (natural_lse, "fi2113_fi4485_one_unit_of_lse"),
    (nan_of_empty_rows, "rows_whose_mask_keeps_nothing"),
    (out_with_the_strides_of_q, "fi1865_strides_of_out_are_its_own"),
]


def fails(report: str) -> bool:
    try:
        REPORTS[report](Run("reference", "cpu"))
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize(
    ("fault", "report"), REQUEST_FAULTS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_fault_of_the_call_is_seen(
    fault: Callable[..., Any], report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fails(report)
    monkeypatch.setattr(ops, "reference_attention", lambda r: reference_attention(fault(r)))
    assert fails(report)


@pytest.mark.parametrize(
    ("fault", "report"), RESULT_FAULTS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_fault_of_the_result_is_seen(
    fault: Callable[..., Any], report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fails(report)

    def faulty(r: PrefillRequest) -> tuple[Tensor, Tensor | None]:
        out, lse = reference_attention(r)
        fault(r, out, lse)
        return out, lse

    monkeypatch.setattr(ops, "reference_attention", faulty)
    assert fails(report)


def test_a_check_that_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the wrong shape reach the backend, as they did elsewhere."""
    monkeypatch.setattr(request, "_check_mask", lambda *_: None)
    assert fails_otherwise("fi3176_masks_of_the_wrong_shape")


def test_a_mask_that_stays_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """State of one call in the next, on the way to a kernel."""
    original, kept = StubKernel.__call__, []

    def faulty(self: StubKernel, *arguments: Any) -> None:
        given = list(arguments)
        if given[9] is not None:
            kept.append(given[9])
        elif kept:
            given[9] = kept[-1]
        original(self, *given)

    monkeypatch.setattr(StubKernel, "__call__", faulty)
    with pytest.raises(AssertionError):
        REPORTS["fi1028_a_mask_does_not_stay"](Run("fa3", "cpu"))


def fails_otherwise(report: str) -> bool:
    """Whether another error than the documented one comes, or none."""
    try:
        REPORTS[report](Run("reference", "cpu"))
    except BaseException:
        return True
    return False
