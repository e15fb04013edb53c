"""Who runs a case in `python -m prefill bench`, and the check of their results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import prefill
from bench_cases import CAUSAL, CPU, FEATURES, FEW_HEADS, MASKS, SQUARE, small
from fakes import library, pretend
from prefill.bench import contenders, masks
from prefill.bench.cases import (
    FULL_AND_CAUSAL,
    Case,
    Heads,
    Inputs,
    Length,
    Variant,
    masked,
    quantised,
    random_sinks,
)
from prefill.bench.check import UNIT_ROUNDOFF, Checker


def test_available_contenders() -> None:
    assert list(contenders.available())[:4] == ["fa3", "fa2", "cudnn", "flash"]


@pytest.mark.parametrize("heads", [Heads(4, 2, 64, 64), Heads(2, 2, 192, 128)])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_sdpa_computes_the_case(heads: Heads, kind: str) -> None:
    case = small(FULL_AND_CAUSAL[kind], heads=heads)
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    sdpa = contenders.Sdpa("math", SDPBackend.MATH)
    out, reason = contenders.attempt(sdpa, lambda: sdpa.prepare(case, inputs)())
    assert reason == ""
    assert Checker(case, inputs).problem(sdpa.as_nhd(out), case.dtype) == ""


@pytest.mark.parametrize("length", [SQUARE, Length(40, 200)])
@pytest.mark.parametrize(
    "variant",
    [
        *(masked(mask, "full", packed=packed) for mask in MASKS.values() for packed in (0, 1)),
        Variant({"causal": True, "window_left": 9}),
        Variant({"window_left": 9}),
        Variant({"causal": True, "pos_encoding_mode": "ALIBI"}),
        Variant({"pos_encoding_mode": "ALIBI", "window_left": 20}),
        Variant({**masked(masks.PADDING, "full").arguments, "window_left": 120}),
        Variant({**masked(masks.PADDING, "full").arguments, "window_left": 120, "causal": True}),
    ],
)
def test_sdpa_is_given_features_as_masks(variant: Variant, length: Length) -> None:
    case = small(variant, length)
    arguments = case.arguments(CPU)
    sets = [case.inputs(CPU, arguments, seed) for seed in range(2)]
    sdpa = contenders.Sdpa("math", SDPBackend.MATH)
    for inputs in sets:
        out, reason = contenders.attempt(sdpa, lambda x=inputs: sdpa.prepare(case, x)())
        assert reason == ""
        assert Checker(case, inputs).problem(sdpa.as_nhd(out), case.dtype) == ""
    assert sdpa._mask(case, sets[0]) is sdpa._mask(case, sets[1])
    other = small(CAUSAL, length)
    inputs = other.inputs(CPU, {"window_left": 0}, 0)
    assert sdpa._mask(other, inputs) is not sdpa._mask(case, sets[0])


def test_sdpa_says_which_features_it_lacks() -> None:
    sdpa = contenders.Sdpa("math", SDPBackend.MATH)
    reasons = {
        "d128 16k soft cap": "SDPA has no logits_soft_cap",
        "d128 16k sinks": "SDPA has no sinks",
        "d128 16k RoPE": "SDPA has no ROPE_LLAMA",
        "d128 16k soft cap, ALiBi": "SDPA has no logits_soft_cap",
        "d128 16k ALiBi": "SDPA's bias for ALiBi would take 17.2 GB",
    }
    for name, text in reasons.items():
        case = next(case for case in FEATURES if case.name == name)
        empty = torch.empty(1, 1, 1)
        inputs = Inputs(empty, empty, empty, case.arguments(CPU))
        out, reason = contenders.attempt(sdpa, lambda c=case, i=inputs: sdpa.prepare(c, i))
        assert out is None
        assert text in reason


def test_sdpa_refuses_what_it_would_compute_otherwise() -> None:
    sdpa = contenders.Sdpa("math", SDPBackend.MATH)
    capped = small(Variant({"logits_soft_cap": 30.0}))
    append = small(length=Length(16, 96))
    for case, text in (
        (capped, "SDPA has no logits_soft_cap"),
        (append, "SDPA's math aligns its causal mask to the first key"),
    ):
        inputs = case.inputs(CPU, case.arguments(CPU), 0)
        out, reason = contenders.attempt(sdpa, lambda c=case, i=inputs: sdpa.prepare(c, i)())
        assert out is None
        assert text in reason
    one_row = small(length=Length(1, 96))
    inputs = one_row.inputs(CPU, one_row.arguments(CPU), 0)
    out = sdpa.as_nhd(sdpa.prepare(one_row, inputs)())
    assert Checker(one_row, inputs).problem(out, one_row.dtype) == ""


@pytest.mark.parametrize("heads", [Heads(4, 4, 64, 64), FEW_HEADS])
def test_flash_has_a_causal_mask_that_ends_at_the_last_key(heads: Heads) -> None:
    """What the bias means: on a CPU torch writes it out."""
    append = small(length=Length(16, 96), heads=heads)
    inputs = append.inputs(CPU, append.arguments(CPU), 0)
    call = contenders.Sdpa("flash", SDPBackend.FLASH_ATTENTION).prepare(append, inputs)
    math = contenders.Sdpa("math", SDPBackend.MATH)
    with math.context():
        assert Checker(append, inputs).problem(math.as_nhd(call()), append.dtype) == ""


def test_ours_writes_into_a_given_output(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = pretend(monkeypatch)
    case = small()
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    call = contenders.Ours("fa3").prepare(case, inputs)
    out = call()
    assert call() is out
    assert [made["backend"] for made in stub.calls] == ["fa3", "fa3"]
    assert Checker(case, inputs).problem(out, case.dtype) == ""


def test_a_refusal_keeps_its_reason() -> None:
    ours = contenders.Ours("fa3")
    case = small()
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    out, reason = contenders.attempt(ours, lambda: ours.prepare(case, inputs)())
    assert out is None
    assert reason.startswith("NotImplementedError: backend='fa3' cannot run this call")


@pytest.mark.parametrize("float8", ["qkv", "kv"])
def test_float8_is_computed_in_the_case_s_dtype(
    monkeypatch: pytest.MonkeyPatch, float8: str
) -> None:
    pretend(monkeypatch)
    case = small(quantised(float8, "causal", causal=True), Length(60, 90))
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    assert (inputs.q.dtype, inputs.k.dtype, inputs.v.dtype) == case.dtypes
    call = contenders.available()["fa3"].prepare(case, inputs)
    checker = Checker(case, inputs)
    assert checker.problem(call(), case.dtype) == ""
    unscaled = case.inputs(CPU, {"causal": True}, 0)
    wrong = contenders.available()["fa3"].prepare(case, unscaled)()
    assert "times the tolerance" in checker.problem(wrong, case.dtype)


def reference(case: Case, inputs: Any) -> torch.Tensor:
    return prefill.single_prefill_with_kv_cache(
        inputs.q, inputs.k, inputs.v, backend="reference", **inputs.arguments
    )


@pytest.mark.parametrize(
    "variant",
    [
        Variant(),
        Variant({"causal": True}),
        Variant({"causal": True, "window_left": 20}),
        Variant({"window_left": 20}),
        Variant({"causal": True, "logits_soft_cap": 5.0, "pos_encoding_mode": "ROPE_LLAMA"}),
        Variant({"pos_encoding_mode": "ALIBI"}),
        Variant({"custom_mask": lambda case, _: torch.rand(case.length) < 0.5}),
        masked(masks.RANDOM, "full"),
        Variant({"causal": True, "sinks": random_sinks}),
    ],
)
@pytest.mark.parametrize("length", [Length(96, 96), Length(40, 96), Length(5, 93)])
def test_check_accepts_the_reference(variant: Variant, length: Length) -> None:
    case = small(variant, length)
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    checker = Checker(case, inputs)
    right = reference(case, inputs)
    assert checker.problem(right, case.dtype) == ""
    assert checker.problem(right.clone(), case.dtype) == ""


@pytest.mark.parametrize(
    "variant",
    [case.variant for case in FEATURES if case.baseline and case.name.startswith("d128 16k")],
)
def test_check_finds_a_feature_that_is_left_out(variant: Variant) -> None:
    causal = bool(variant.arguments.get("causal"))
    arguments = dict(variant.arguments)
    for name, less in (("window_left", 40), ("logits_soft_cap", 1.0)):  # to be felt at this size
        if name in arguments:
            arguments[name] = less
    case = small(Variant(arguments), Length(200, 200))
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    plain = prefill.single_prefill_with_kv_cache(inputs.q, inputs.k, inputs.v, causal=causal)
    assert "times the tolerance" in Checker(case, inputs).problem(plain, case.dtype)


def test_check_finds_faults() -> None:
    case = small(length=Length(200, 200))
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    checker = Checker(case, inputs)
    right = reference(case, inputs)
    assert "shape" in checker.problem(right.transpose(0, 1), case.dtype)
    holed = right.clone().index_fill_(0, torch.tensor([50]), math.nan)
    assert "NaN" in checker.problem(holed, case.dtype)
    assert "rows 184 to 199" in checker.problem(right * 1.05, case.dtype)
    assert checker.problem(right, case.dtype) == ""
    moved = right.clone()
    moved[50, 1] = moved[51, 1]  # in none of the rows that are always looked at
    assert "rows 50 to 50" in checker.problem(moved, case.dtype)


@pytest.mark.parametrize(
    ("float8", "native", "dtype"),
    [
        ("", True, torch.float16),
        ("kv", True, torch.float16),
        ("qkv", True, torch.float8_e4m3fn),
        ("qkv", False, torch.bfloat16),
    ],
)
def test_check_judges_by_what_computes(
    monkeypatch: pytest.MonkeyPatch, float8: str, native: bool, dtype: torch.dtype
) -> None:
    """All of float8 is bfloat16's where it is widened, whatever the grid's dtype."""
    pretend(monkeypatch, native=library() if native else library(float8=()))
    variant, heads = quantised(float8, "causal", causal=True), Heads(4, 2, 128, 128)
    case = small(variant, heads=heads, dtype=torch.float16)
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    assert contenders.Ours("fa3").dtype(case, inputs) == dtype
    checker, right = Checker(case, inputs), reference(case, inputs).float()
    for judged, unit in UNIT_ROUNDOFF.items():
        off = (right * (1 + unit)).to(case.o_dtype)
        assert (checker.problem(off, dtype) == "") == (unit <= UNIT_ROUNDOFF[dtype]), judged


def test_what_others_multiply_in() -> None:
    mixed = small(quantised("kv", "causal"), dtype=torch.float16)
    for case in (small(), mixed, small(quantised("qkv", "causal"))):
        inputs = case.inputs(CPU, {}, 0)
        sdpa = contenders.Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION)
        assert sdpa.dtype(case, inputs) == case.dtype
        assert contenders.FlashInfer().dtype(case, inputs) == case.dtypes[0]
