"""`python -m prefill bench`, as far as it goes without a GPU."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import prefill
from fakes import pretend
from prefill import backends
from prefill.__main__ import main
from prefill.bench import command, contenders, host, machine, masks, report, timing
from prefill.bench.cases import (
    FULL_AND_CAUSAL,
    GRIDS,
    Case,
    Grid,
    Heads,
    Inputs,
    Length,
    Variant,
    expand,
    masked,
    parse_lengths,
    quantised,
    random_sinks,
    select,
    square,
)
from prefill.bench.check import Checker
from prefill.bench.masks import visible_pairs
from prefill.bench.timing import Prepared, Samples

CPU = torch.device("cpu")
CORE = GRIDS["core"]
CAUSAL = FULL_AND_CAUSAL["causal"]
SQUARE = Length(96, 96)
FEW_HEADS = Heads(4, 2, 64, 64)


def small(
    variant: Variant = CAUSAL,
    length: Length = SQUARE,
    heads: Heads = FEW_HEADS,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    return Case(heads, length, "causal", variant, dtype)


class FakeRunner:
    """Takes a time that is known, and writes down its turns."""

    def __init__(self, name: str, seconds: float, replay_seconds: float, turns: list[str]) -> None:
        self.name = name
        self.replay_seconds = replay_seconds
        self._seconds = seconds
        self._turns = turns

    def burst(self) -> float:
        self._turns.append(f"burst {self.name}")
        return self._seconds

    def sustained(self, replays: int) -> tuple[list[float], int | None]:
        self._turns.append(f"sustained {self.name}")
        return [self._seconds * 1.25] * replays, 1600


# Cases


def test_core_grid() -> None:
    names = [case.name for case in expand(CORE)]
    lengths = ["512", "1k", "2k", "4k", "8k", "16k", "32k"]
    assert names == [f"d128 {n} {kind}" for kind in ("full", "causal") for n in lengths]
    assert all(case.heads == (32, 8, 128, 128) for case in expand(CORE))


def test_dims_grid() -> None:
    names = [case.name for case in expand(GRIDS["dims"])]
    assert len(names) == 18
    assert {"d64 2k full", "d256 16k causal", "d192/128 8k causal"} <= set(names)


def test_append_grid() -> None:
    assert len(APPEND) == 17
    assert {case.unit for case in APPEND} == {"us"}
    assert APPEND[0].name == "d128 q1 kv4k causal"
    assert APPEND[14].name == "d128 q2k kv128k causal"
    plain, tree = APPEND[15:]
    assert (plain.name, tree.name) == ("d128 q64 kv8k full", "d128 q64 kv8k mask tree")
    assert tree.baseline == plain.name
    assert tree.heads == (32, 8, 128, 128)


def test_balance_grid() -> None:
    cases = expand(GRIDS["balance"])
    assert {case.unit for case in cases} == {"TFLOP/s"}
    assert {case.name for case in cases} == {
        *(
            f"{heads} heads d128 {length} {kind}"
            for heads in ("28/4", "40/8")
            for length in ("512", "1k", "2k", "4k")
            for kind in ("full", "causal")
        ),
        *(f"{n}/{n} heads d128 8k {kind}" for n in (1, 2, 4) for kind in ("full", "causal")),
    }


APPEND = expand(GRIDS["append"])
FEATURES = expand(GRIDS["features"])
MASKS = {
    "tril": masks.TRIL,
    "padding": masks.PADDING,
    "blocks": masks.BLOCK_DIAGONAL,
    "random": masks.RANDOM,
    "tree": masks.TREE,
}


def test_features_grid() -> None:
    by_name = {case.name: case for case in FEATURES}
    assert {
        *("d128 16k causal", "d128 16k full", "d128 4k causal", "d128 16k sinks"),
        *("d128 16k soft cap", "d128 4k soft cap", "d128 16k ALiBi", "d128 4k ALiBi"),
        *("d128 16k RoPE", "d128 4k RoPE", "d128 16k window 1023", "d128 16k window 4095"),
        *("d128 16k soft cap, window 1023", "d128 16k soft cap, ALiBi", "d128 16k mask tril"),
        *("d128 16k mask tril, bool", "d128 16k mask padding", "d128 16k mask 8 blocks"),
        *("d128 16k mask random", "d64 16k soft cap"),
    } <= set(by_name)
    few, many = by_name["d128 q4k kv16k window 1023"], by_name["d128 q4k kv32k window 1023"]
    assert few.flop == many.flop  # each row sees its whole window
    for case in FEATURES:
        plain = by_name.get(case.baseline or "")
        assert (plain is None) == (case.variant_name in ("causal", "full"))
        if plain is not None:
            assert plain.baseline is None
            assert plain.unit == case.unit
            assert FEATURES.index(plain) < FEATURES.index(case)
            whole_mask = case.variant.arguments.keys() & {"custom_mask", "packed_custom_mask"}
            assert whole_mask or plain.variant_name == "causal"


def test_fp8_grid() -> None:
    cases = {case.name: case for case in expand(GRIDS["fp8"])}
    kinds = ["full", "causal", "full float8", "causal float8"]
    of_d128 = [*kinds, "full float8 kv", "causal float8 kv"]
    assert list(cases) == [
        *(f"d128 {length} {kind}" for kind in of_d128 for length in ("2k", "8k", "16k")),
        *(f"{dims} 8k {kind}" for dims in ("d64", "d256", "d192/128") for kind in kinds),
    ]
    for name, case in cases.items():
        plain = name.removesuffix(" kv").removesuffix(" float8")
        assert case.baseline == (None if plain == name else plain)
        assert plain in cases
        assert case.o_dtype == torch.bfloat16
    e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16
    whole, mixed = cases["d128 8k causal float8"], cases["d128 8k causal float8 kv"]
    assert (whole.dtypes, mixed.dtypes) == ((e4m3,) * 3, (bf16, e4m3, e4m3))
    assert cases["d128 8k causal"].dtypes == (bf16,) * 3
    assert whole.input_bytes == 8192 * 128 * (32 + 8 + 8)
    assert mixed.input_bytes == 8192 * 128 * (2 * 32 + 8 + 8)
    assert cases["d192/128 8k full"].input_bytes == 8192 * 32 * 2 * (192 + 192 + 128)
    assert set(whole.arguments(CPU)) == {"causal", "scale_q", "scale_k", "scale_v"}
    assert set(mixed.arguments(CPU)) == {"causal", "scale_k", "scale_v"}
    assert (whole.describe()["float8"], mixed.describe()["float8"]) == ("qkv", "kv")


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
    assert checker.problem(call()) == ""
    unscaled = case.inputs(CPU, {"causal": True}, 0)
    wrong = contenders.available()["fa3"].prepare(case, unscaled)()
    assert "times the tolerance" in checker.problem(wrong)


@pytest.mark.parametrize("grid", GRIDS)
def test_names_are_unique(grid: str) -> None:
    names = [case.name for case in expand(GRIDS[grid])]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(96, 96), (50, 83), (8, 200), (7, 7)])
def test_masks_keep_as_many_pairs_as_they_say(name: str, lengths: tuple[int, int]) -> None:
    mask = MASKS[name].make(*lengths, CPU)
    assert mask.shape == lengths
    assert mask.dtype == torch.bool
    tolerance = {"tril": lengths[0], "random": 5 * math.sqrt(mask.numel()) / 2}.get(name, 0)
    assert abs(MASKS[name].pairs(*lengths) - int(mask.sum())) <= tolerance


def test_what_the_masks_are() -> None:
    assert torch.equal(masks.TRIL.make(40, 64, CPU), torch.ones(40, 64).tril(24).bool())
    padded = masks.PADDING.make(3, 10, CPU)
    assert padded.tolist() == [[True] * 7 + [False] * 3] * 3
    blocks = masks.BLOCK_DIAGONAL.make(64, 64, CPU)
    assert torch.equal(blocks, torch.block_diag(*[torch.ones(8, 8)] * 8).bool())
    tree = masks.TREE.make(6, 9, CPU)
    assert tree[:, :3].all()
    seen = [[int(j) for j in row.nonzero()] for row in tree[:, 3:]]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]


@pytest.mark.parametrize("window", [-1, 0, 30])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_is_made_in_parts(
    causal: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_ROWS", 16)
    position = torch.arange(50)[:, None] + 30
    key = torch.arange(80)[None, :]
    seen = ((key <= position) | (not causal)) & ((key >= position - window) | (window < 0))
    assert torch.equal(masks.visible(50, 80, causal, window, CPU), seen)
    packed = prefill.packbits(seen, bitorder="little")
    assert torch.equal(masks.unpack(packed, 50, 80), seen)
    slopes = torch.tensor([0.5, 2.0])
    bias = torch.where(seen, slopes[:, None, None] * (key - position), -torch.inf)
    assert torch.equal(masks.alibi_bias(slopes, seen, torch.float32)[0], bias)


def test_masks_are_given_as_bits_or_bool() -> None:
    mask = masks.TRIL.make(*SQUARE, CPU)
    bits, plain = (masked(masks.TRIL, "causal", packed=packed) for packed in (True, False))
    (packed,) = small(bits).arguments(CPU).items()
    assert packed[0] == "packed_custom_mask"
    assert torch.equal(packed[1], prefill.packbits(mask, bitorder="little"))
    (given,) = small(plain).arguments(CPU).items()
    assert given[0] == "custom_mask"
    assert torch.equal(given[1], mask)
    assert small(bits).flop == small(plain).flop == small(CAUSAL).flop


def test_a_grid_of_another_kind_is_one_entry() -> None:
    grid = Grid(
        heads=(Heads(32, 4, 128, 128),),
        lengths=(Length(1, 4096), Length(512, 131072)),
        variants={
            "soft cap": Variant({"causal": True, "logits_soft_cap": 30.0}),
            "scaled": Variant({"scale_q": lambda case, device: torch.ones(case.heads.qo)}),
        },
        dtype=torch.float8_e4m3fn,
        unit="us",
    )
    cases = expand([grid])
    assert [case.name for case in cases] == [
        "float8_e4m3fn d128 q1 kv4k soft cap",
        "float8_e4m3fn d128 q512 kv128k soft cap",
        "float8_e4m3fn d128 q1 kv4k scaled",
        "float8_e4m3fn d128 q512 kv128k scaled",
    ]
    assert cases[0].arguments(CPU) == {"causal": True, "logits_soft_cap": 30.0}
    assert cases[2].arguments(CPU)["scale_q"].shape == (32,)
    inputs = cases[0].inputs(CPU, {}, 0)
    assert inputs.q.shape == (1, 32, 128)
    assert inputs.v.shape == (4096, 4, 128)
    assert inputs.q.dtype == torch.float8_e4m3fn
    assert cases[0].o_dtype == torch.bfloat16


def test_filters() -> None:
    cases = expand(CORE, torch.float16)
    assert {case.dtype for case in cases} == {torch.float16}
    chosen = select(cases, parse_lengths("512,4k 32K"), "Causal")
    assert [case.length.kv for case in chosen] == [512, 4096, 32768]
    assert all(case.variant_name == "causal" for case in chosen)


def test_selected_cases_bring_what_they_are_compared_with() -> None:
    names = [case.name for case in select(FEATURES, [16384], "d128 16k mask")]
    assert names[:3] == ["d128 16k full", "d128 16k causal", "d128 16k mask tril"]
    assert len(names) == 7
    names = [case.name for case in select(APPEND, [], "tree")]
    assert names == ["d128 q64 kv8k full", "d128 q64 kv8k mask tree"]


@pytest.mark.parametrize("text", ["", "4m", "k", "-1", "0", "4.5k"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        parse_lengths(text)


def test_flop_count() -> None:
    case = Case(Heads(32, 8, 192, 128), Length(1024, 1024), "full", Variant(), torch.bfloat16)
    assert case.flop == 2 * 1024 * 1024 * 32 * (192 + 128)
    causal = Case(case.heads, case.length, "causal", FULL_AND_CAUSAL["causal"], case.dtype)
    assert causal.flop == case.flop / 2
    masked = Case(
        case.heads, case.length, "mask", Variant({}, lambda qo, kv: qo * kv / 4), case.dtype
    )
    assert masked.flop == case.flop / 4
    assert case.input_bytes == 2 * 1024 * (32 * 192 + 8 * (192 + 128))


@pytest.mark.parametrize("window", [-1, 0, 5, 40, 200])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(96, 96), (16, 96), (96, 16), (1, 96)])
def test_pairs_are_those_of_the_mask(lengths: tuple[int, int], causal: bool, window: int) -> None:
    qo_len, kv_len = lengths
    position = torch.arange(qo_len)[:, None] + kv_len - qo_len
    key = torch.arange(kv_len)[None, :]
    seen = (key <= position) | (not causal)
    if window >= 0:
        seen = seen & (key >= position - window)
    # An area counts half of a cell on the diagonal, and each row has at most one on either edge.
    assert visible_pairs(qo_len, kv_len, causal, window) == pytest.approx(
        int(seen.sum()), abs=qo_len
    )


def test_inputs_are_independent_and_repeatable() -> None:
    case = small()
    first, again, other = (case.inputs(CPU, {}, seed).q for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# Contenders and the check of their results


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
    assert Checker(case, inputs).problem(sdpa.as_nhd(out)) == ""


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
        assert Checker(case, inputs).problem(sdpa.as_nhd(out)) == ""
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
    assert Checker(one_row, inputs).problem(out) == ""


@pytest.mark.parametrize("heads", [Heads(4, 4, 64, 64), FEW_HEADS])
def test_flash_has_a_causal_mask_that_ends_at_the_last_key(heads: Heads) -> None:
    """What the bias means: on a CPU torch writes it out."""
    append = small(length=Length(16, 96), heads=heads)
    inputs = append.inputs(CPU, append.arguments(CPU), 0)
    call = contenders.Sdpa("flash", SDPBackend.FLASH_ATTENTION).prepare(append, inputs)
    math = contenders.Sdpa("math", SDPBackend.MATH)
    with math.context():
        assert Checker(append, inputs).problem(math.as_nhd(call())) == ""


def test_ours_writes_into_a_given_output(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = pretend(monkeypatch)
    case = small()
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    call = contenders.Ours("fa3").prepare(case, inputs)
    out = call()
    assert call() is out
    assert [made["backend"] for made in stub.calls] == ["fa3", "fa3"]
    assert Checker(case, inputs).problem(out) == ""


def test_a_refusal_keeps_its_reason() -> None:
    ours = contenders.Ours("fa3")
    case = small()
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    out, reason = contenders.attempt(ours, lambda: ours.prepare(case, inputs)())
    assert out is None
    assert reason.startswith("NotImplementedError: backend='fa3' cannot run this call")


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
    assert checker.problem(right) == ""
    assert checker.problem(right.clone()) == ""


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
    assert "times the tolerance" in Checker(case, inputs).problem(plain)


def test_check_finds_faults() -> None:
    case = small(length=Length(200, 200))
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    checker = Checker(case, inputs)
    right = reference(case, inputs)
    assert "shape" in checker.problem(right.transpose(0, 1))
    assert "NaN" in checker.problem(right.clone().index_fill_(0, torch.tensor([50]), math.nan))
    assert "rows 184 to 199" in checker.problem(right * 1.05)
    assert checker.problem(right) == ""
    moved = right.clone()
    moved[50, 1] = moved[51, 1]  # in none of the rows that are always looked at
    assert "rows 50 to 50" in checker.problem(moved)


@pytest.mark.parametrize(("float8", "text"), [("qkv", ""), ("kv", "times the tolerance")])
def test_check_judges_by_what_computes(float8: str, text: str) -> None:
    """All of float8 is bfloat16's, whatever the grid's dtype; an error that float16 has not."""
    case = small(quantised(float8, "causal", causal=True), dtype=torch.float16)
    inputs = case.inputs(CPU, case.arguments(CPU), 0)
    off = reference(case, inputs).float() * (1 + 2.0**-8)
    assert text in (problem := Checker(case, inputs).problem(off.to(case.o_dtype)))
    assert bool(text) == bool(problem)


# Timing


def test_statistics() -> None:
    assert timing.statistics([4.0, 1.0, 3.0, 2.0]) == (1.75, 2.5, 3.25, 4)
    assert timing.statistics([7.0]) == (7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="no values"):
        timing.statistics([])


def test_input_sets() -> None:
    l2 = 60 << 20
    for grid in GRIDS.values():
        for case in expand(grid):
            sets = timing.count_sets(case, l2)
            assert sets >= 3
            assert sets * case.input_bytes <= timing.MOST_INPUT_BYTES
            assert sets * case.input_bytes >= 2 * l2
            assert timing.calls_per_graph(case, sets) in (1, sets)
    short, long = expand(CORE)[0], expand(CORE)[6]
    assert timing.calls_per_graph(short, timing.count_sets(short, l2)) > 16
    assert timing.calls_per_graph(long, timing.count_sets(long, l2)) == 1
    tiny = small(length=Length(1, 64))
    assert timing.count_sets(tiny, l2) == timing.MOST_SETS


def test_rounds_keep_to_the_budget() -> None:
    assert timing.rounds(2.0, [0.05, 0.05], (5, 24)) == 20
    assert timing.rounds(2.0, [0.001], (5, 24)) == 24
    assert timing.rounds(2.0, [1.0, 1.0], (5, 24)) == 5


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    runners = [FakeRunner(name, 1e-4, 1e-3, turns) for name in "abc"]
    effort = timing.Effort(0.0, (2, 9), 0.0, (3, 9))
    samples = timing.measure(runners, ["burst", "sustained"], effort)
    orders = ["abc", "bca", "abc", "bca", "cab"]
    regimes = ["burst", "burst", "sustained", "sustained", "sustained"]
    assert turns == [
        f"{regime} {name}" for regime, order in zip(regimes, orders, strict=True) for name in order
    ]
    assert samples["a"]["burst"].seconds == [1e-4] * 2
    assert samples["b"]["sustained"].clocks == [1600] * 3
    assert len(samples["c"]["sustained"].seconds) == 3 * 80
    assert timing.measure([], ["burst"], effort) == {}


def test_the_core_grid_takes_minutes() -> None:
    """At speeds like an H200's; the graphs' warm-up is part of each sustained turn."""
    total = 0.0
    for case in expand(CORE):
        seconds = [case.flop / speed for speed in (650e12, 350e12, 600e12, 340e12)]
        calls = timing.calls_per_graph(case, timing.count_sets(case, 60 << 20))
        turns: list[str] = []
        runners = [FakeRunner(str(i), s, s * calls, turns) for i, s in enumerate(seconds)]
        timing.measure(runners, timing.REGIMES, timing.NORMAL)
        replays = {r.name: r.replay_seconds for r in runners}
        for turn in turns:
            regime, name = turn.split()
            timed = max(timing.TIMED, 3 * replays[name])
            cost = timing.GAP + replays[name] if regime == "burst" else timing.WARM + timed
            total += cost
    assert 90.0 < total < 140.0, total


class FakeDevice:
    """Graphs that make their calls again, and events 3 ms apart."""

    def __init__(self) -> None:
        self.captured: list[FakeDevice.Graph] = []
        self.calls: list[contenders.Call] = []

    class Graph:
        def __init__(self) -> None:
            self.replays = 0
            self.calls: list[contenders.Call] = []

        def replay(self) -> None:
            self.replays += 1
            for call in self.calls:
                call()

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return 3.0

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        before = len(self.calls)
        yield
        graph.calls = self.calls[before:]
        self.captured.append(graph)


class Noted:
    """A contender whose calls the fake device sees."""

    def __init__(self, backend: str, device: FakeDevice, factor: float = 1.0) -> None:
        self._ours = contenders.Ours(backend)
        self._device = device
        self._factor = factor
        self.name = backend
        self.context = self._ours.context
        self.as_nhd = self._ours.as_nhd

    def prepare(self, case: Case, inputs: Any) -> contenders.Call:
        call = self._ours.prepare(case, inputs)

        def noted() -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                self._device.calls.append(noted)
            return call().mul_(self._factor)

        return noted


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    pretend(monkeypatch)
    device = FakeDevice()
    capturing = []

    @contextmanager
    def graph(graph: FakeDevice.Graph) -> Iterator[None]:
        capturing.append(True)
        with device.capture(graph):
            yield
        capturing.pop()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeDevice.Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeDevice.Event())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    monkeypatch.setattr(timing, "MOST_SETS", 4)
    return device


@pytest.mark.parametrize("per_graph", [1, 4])
def test_graphs(fake_device: FakeDevice, per_graph: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "calls_per_graph", lambda case, sets: per_graph)
    chosen = [Noted("fa3", fake_device), Noted("fa2", fake_device, 1.05), Noted("fa9", fake_device)]
    prepared = timing.prepare(small(), chosen, CPU, lambda: 1500)
    assert prepared.sets == 4
    assert [runner.name for runner in prepared.runners] == ["fa3"]
    assert "times the tolerance" in prepared.wrong["fa2"]
    assert prepared.refused["fa9"].startswith("ValueError: backend")
    graphs = fake_device.captured[: 4 // per_graph]
    assert [len(graph.calls) for graph in graphs] == [per_graph] * len(graphs)
    (runner,) = prepared.runners
    assert runner.replay_seconds == pytest.approx(3e-3)
    assert runner.burst() == pytest.approx(3e-3 / per_graph)
    before = sum(graph.replays for graph in graphs)
    seconds, clock = runner.sustained(5)
    assert seconds == pytest.approx([3e-3 / per_graph] * 5)
    assert clock == 1500
    after = [graph.replays for graph in graphs]
    assert sum(after) - before == math.ceil(timing.WARM / 3e-3) + 5
    assert max(after) - min(after) <= 1  # the graphs take turns


def test_host_times() -> None:
    calls = []
    synchronized = []
    result = host.measure(
        lambda: calls.append(0), lambda: synchronized.append(0), calls=40, batch=10
    )
    assert len(calls) == 50
    assert len(synchronized) == 5
    assert result["samples"] == 40
    assert 0 < result["low"] <= result["median"] <= result["high"]


# Report


def measured(
    name: str = "d128 512 full", slower: float = 1.0, **kwargs: dict[str, str]
) -> dict[str, Any]:
    case = next(case for case in expand(CORE) if case.name == name)
    times = {"fa3": 1e-5, "cudnn": 1.2e-5 * slower, "fa2": 2e-5, "flash": 2.2e-5}
    samples = {
        contender: {
            "burst": Samples([t, t * 1.1, t * 0.9]),
            "sustained": Samples([t * 1.2], [1600, 1500]),
        }
        for contender, t in times.items()
        if contender not in kwargs.get("refused", {}) and contender not in kwargs.get("wrong", {})
    }
    refused, wrong = kwargs.get("refused", {}), kwargs.get("wrong", {})
    return report.case_result(case, 3, samples, refused, wrong)


def test_case_result() -> None:
    result = measured()
    assert json.loads(json.dumps(result)) == result
    assert result["results"]["fa3"]["burst"] == pytest.approx(
        {
            "low": 0.95e-5,
            "median": 1e-5,
            "high": 1.05e-5,
            "samples": 3,
            "tflops": result["flop"] / 1e-5 / 1e12,
        }
    )
    assert result["results"]["fa3"]["sustained"]["sm_clock_mhz"] == 1550
    assert result["ratios"]["burst"] == pytest.approx({"ours/cudnn": 1.2, "fa2/flash": 1.1})


def test_ratios_of_those_that_ran() -> None:
    without_fa3 = measured(refused={"fa3": "no Hopper"})
    assert without_fa3["ratios"]["burst"]["ours/cudnn"] == pytest.approx(0.6)
    assert "fa2/flash" not in measured(refused={"flash": "no"})["ratios"]["burst"]
    assert "ours/cudnn" not in measured(wrong={"cudnn": "rows"})["ratios"]["burst"]


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cases = [
        measured(),
        measured("d128 16k causal", 2.0, refused={"flash": "None"}, wrong={"fa2": "rows"}),
    ]
    text = report.result_table(cases, ["fa3", "fa2", "cudnn", "flash"], "burst")
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "case",
        "---------------",
        "d128 512 full",
        "d128 16k causal",
        "geometric mean",
    ]
    assert text.splitlines()[2].split() == [
        *("d128", "512", "full", "429", "215", "358", "195", "1.20", "1.10")
    ]
    assert text.splitlines()[3].split()[4:] == ["WRONG", "91626", "-", "2.40", "-"]
    assert text.splitlines()[4].split()[2:] == ["1.697", "1.100"]
    assert max(map(len, text.splitlines())) <= 80


def feature_cases() -> list[dict[str, Any]]:
    """Plain causal, and a soft cap that takes fa3 twice as long and fa2 as long."""
    found = []
    for name, times in (
        ("d128 4k causal", {"fa3": 1e-3, "fa2": 2e-3, "cudnn": 1e-3}),
        ("d128 4k soft cap", {"fa3": 2e-3, "fa2": 2e-3}),
        ("d128 4k RoPE", {}),
    ):
        case = next(case for case in FEATURES if case.name == name)
        samples = {who: {"burst": Samples([seconds])} for who, seconds in times.items()}
        reasons = {who: f"{who} cannot" for who in ("fa3", "fa2", "cudnn") if who not in times}
        found.append(report.case_result(case, 3, samples, reasons, {}))
    return found


def test_ratio_to_plain() -> None:
    plain, capped, rope = cases = feature_cases()
    assert capped["baseline"] == plain["name"]
    assert plain["baseline"] is None
    assert capped["arguments"] == {"causal": True, "logits_soft_cap": 30.0}
    assert report.to_plain(capped, cases, "burst") == pytest.approx({"fa3": 0.5, "fa2": 1.0})
    assert report.to_plain(plain, cases, "burst") == {}
    assert report.to_plain(rope, cases, "burst") == {}
    assert report.to_plain(capped, cases, "sustained") == {}
    assert report.to_plain(capped, [capped], "burst") == {}
    # As many FLOP per second over fewer pairs is no slower.
    windowed = capped | {"results": {"fa3": {"burst": {"tflops": 700.0, "median": 1e-9}}}}
    base = plain["results"]["fa3"]["burst"]["tflops"]
    assert report.to_plain(windowed, cases, "burst") == pytest.approx({"fa3": 700.0 / base})


def test_table_of_features() -> None:
    cases = feature_cases()
    lines = report.markdown_table(cases, ["fa3", "fa2", "cudnn"], "burst").splitlines()
    assert lines == [
        "| case | fa3 | fa2 | cudnn | ours/cudnn | fa2/flash | fa3/plain | fa2/plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| d128 4k causal | 137 | 69 | 137 | 1.00 | - | - | - |",
        "| d128 4k soft cap | 69 | 69 | - | - | - | 0.50 | 1.00 |",
        "| d128 4k RoPE | - | - | - | - | - | - | - |",
        "| geometric mean |  |  |  | 1.000 | - | 0.500 | 1.000 |",
    ]
    text = report.result_table(cases, ["fa2", "cudnn"], "burst")
    assert text.splitlines()[0].split()[-2:] == ["fa2/flash", "fa2/plain"]
    assert report.remarks(cases) == [
        "cudnn: refused: cudnn cannot (d128 4k soft cap, d128 4k RoPE)",
        "fa3: refused: fa3 cannot (d128 4k RoPE)",
        "fa2: refused: fa2 cannot (d128 4k RoPE)",
    ]


def test_remarks_and_progress() -> None:
    cases = [
        measured(name, refused={"flash": "no kernel"}) for name in ("d128 512 full", "d128 1k full")
    ]
    cases.append(measured("d128 2k full", refused={"flash": "no kernel"}, wrong={"fa3": "row 7"}))
    assert report.remarks(cases) == [
        "flash: refused: no kernel (d128 512 full, d128 1k full and 1 more)",
        "fa3: wrong: row 7 (d128 2k full)",
    ]
    assert report.any_wrong(cases)
    assert not report.any_wrong(cases[:2])
    assert report.progress(cases[0], "burst") == (
        "d128 512 full, burst: flash -, fa3 429, cudnn 358, fa2 215, ours/cudnn 1.20"
    )


def test_plot(tmp_path: Path) -> None:
    if report.require_matplotlib():
        pytest.skip("needs matplotlib")
    cases = [measured("d128 512 full"), measured("d128 1k causal")]
    path = tmp_path / "plot.png"
    report.plot(cases, ["fa3", "cudnn"], path, "title")
    assert path.stat().st_size > 0


def test_plot_of_features(tmp_path: Path) -> None:
    if report.require_matplotlib():
        pytest.skip("needs matplotlib")
    path = tmp_path / "plot.svg"
    report.plot(feature_cases(), ["fa3", "fa2", "cudnn"], path, "title")
    assert "d128 4k RoPE" in path.read_text()


def test_smi_line() -> None:
    line = "NVIDIA H200, 580.1, P0, 1980 MHz, 1980 MHz, 3201 MHz, 120.5 W, 700.00 W, 33"
    parsed = machine.parse_smi(line)
    assert parsed["driver_version"] == "580.1"
    assert parsed["power.draw"] == "120.5 W"
    assert set(parsed) == set(machine.SMI_FIELDS)


def test_software() -> None:
    told = machine.software()
    assert told["prefill"] == prefill.__version__
    assert told["commit"]
    assert told["torch"] == torch.__version__


# The command


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lengths", "3k"], "its lengths are 512, 1k"),
        (["--lengths", "long"], "'long' is not a length"),
        (["--contenders", "fa9"], "contenders here are fa3, fa2, cudnn, flash"),
    ],
)
def test_arguments_that_leave_nothing(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "require_matplotlib", lambda: "--plot needs matplotlib")
    assert main(["bench", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sees a GPU, on which each contender takes a time that is known."""
    speeds = {"fa3": 660e12, "fa2": 400e12, "cudnn": 600e12, "flash": 350e12}

    def prepare(case: Case, chosen: Any, *_: Any) -> Prepared:
        prepared = Prepared(3)
        for contender in chosen:
            if contender.name not in speeds or (contender.name, case.length.kv) == ("flash", 1024):
                prepared.refused[contender.name] = "no kernel"
                continue
            noise = random.Random(0).uniform(1.0, 1.01)
            seconds = case.flop / speeds[contender.name] * noise
            prepared.runners.append(FakeRunner(contender.name, seconds, 1e-3, []))
        return prepared

    monkeypatch.setattr(timing, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "card", lambda device: {"name": "Fake GPU"})
    monkeypatch.setattr(machine, "nvidia_smi", lambda device: None)
    monkeypatch.setattr(machine, "SmClock", lambda device: lambda: None)
    monkeypatch.setattr(
        command, "host_times", lambda chosen, device: {"auto": timing.statistics([4e-6])._asdict()}
    )


@pytest.mark.usefixtures("fake_gpu")
def test_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "out.json"
    arguments = ["--quick", "--lengths", "512,1k", "--contenders", "fa3 fa2 cudnn flash"]
    assert main(["bench", *arguments, "--json", os.fspath(path)]) == 0
    written = json.loads(path.read_text())
    assert set(written) == {
        *("format", "grid", "regimes", "contenders", "effort", "software", "card"),
        *("nvidia_smi", "host", "cases", "seconds"),
    }
    assert written["grid"] == "core"
    assert written["host"] is None
    assert [case["name"] for case in written["cases"]] == [
        *("d128 512 full", "d128 1k full", "d128 512 causal", "d128 1k causal"),
    ]
    first, second = written["cases"][:2]
    assert first["ratios"]["burst"]["ours/cudnn"] == pytest.approx(1.1)
    assert first["results"]["fa3"]["burst"]["tflops"] == pytest.approx(660, rel=0.02)
    assert second["results"]["flash"] == {"refused": "no kernel"}
    printed = capsys.readouterr().out
    assert "burst, median TFLOP/s" in printed
    assert "sustained, median TFLOP/s" in printed
    assert "flash: refused: no kernel (d128 1k full, d128 1k causal)" in printed


@pytest.mark.usefixtures("fake_gpu")
def test_a_run_of_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--quick", "--contenders", "fa3 cudnn", "--grid", "append"]
    assert main(["bench", *arguments, "--match", "kv8k", "--json", os.fspath(path)]) == 0
    arguments[-1] = "features"
    capsys.readouterr()
    arguments += ["--match", "4k soft cap", "--regime", "burst"]
    assert main(["bench", *arguments, "--json", os.fspath(path)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [case["name"] for case in written["cases"]] == ["d128 4k causal", "d128 4k soft cap"]
    assert written["cases"][1]["baseline"] == "d128 4k causal"
    assert "fa3/plain" in printed

    assert main(["bench", "--from-json", os.fspath(path)]) == 0
    shown = capsys.readouterr().out
    assert "Fake GPU" in shown
    assert "| case | fa3 | cudnn | ours/cudnn | fa2/flash | fa3/plain |" in shown
    assert "| d128 4k soft cap | " in shown
    assert "| 1.00 |\n" in shown
    assert "sustained" not in shown


@pytest.mark.usefixtures("fake_gpu")
def test_tables_have_one_unit_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(GRIDS, "features", (*GRIDS["features"], GRIDS["append"][-1]))
    arguments = ["--grid", "features", "--regime", "burst", "--quick", "--contenders", "fa3"]
    assert main(["bench", *arguments]) == 0
    lengths, micro = capsys.readouterr().out.split("burst, median us of GPU time")
    assert "burst, median TFLOP/s of GPU time" in lengths
    assert "mask random" in lengths
    assert "mask tree" in micro
    assert "mask random" not in micro


def test_a_case_that_nobody_can_run(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROPE_LLAMA with kernels that refuse it: no figure, and the reason."""
    rope = next(case.variant for case in FEATURES if case.name == "d128 4k RoPE")
    chosen = [
        Noted("fa3", fake_device),
        Noted("fa2", fake_device),
        contenders.Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    ]

    class Without(backends.NativeBackend):
        def unsupported_reasons(self, request: Any, device: Any) -> list[str]:
            assert request.pos_encoding_mode == "ROPE_LLAMA"
            return [f"{self.name} has no ROPE_LLAMA in this test"]

    for name in ("fa3", "fa2"):
        monkeypatch.setitem(backends.BY_NAME, name, Without(name))
    case = small(rope)
    prepared = timing.prepare(case, chosen, CPU, lambda: None)
    assert prepared.runners == []
    result = report.case_result(
        case, prepared.sets, timing.measure([], ["burst"], timing.QUICK), prepared.refused, {}
    )
    told = report.remarks([result])
    assert len(told) == 3
    texts = ("fa3 has no ROPE_LLAMA", "fa2 has no ROPE_LLAMA", "SDPA has no ROPE_LLAMA")
    for line, text in zip(told, texts, strict=True):
        assert "refused" in line
        assert text in line
    assert report.markdown_table([result], ["fa3", "fa2", "cudnn"], "burst").endswith(
        "| - | - | - | - | - | - | - |"
    )


def test_what_no_run_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.json"
    assert main(["bench", "--from-json", os.fspath(path)]) == 2
    assert "cannot read" in capsys.readouterr().err
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        assert main(["bench", "--from-json", os.fspath(path)]) == 2
        assert os.fspath(path) in capsys.readouterr().err


@pytest.mark.usefixtures("fake_gpu")
def test_host_times_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--host"]) == 0
    printed = capsys.readouterr().out
    assert "4.00" in printed
    assert "TFLOP/s" not in printed


@pytest.mark.usefixtures("fake_gpu")
def test_a_wrong_result_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Prepared(3, [], {}, {"fa3": "rows 0 to 15: 9.0 times the tolerance"})
    monkeypatch.setattr(timing, "prepare", lambda *_: wrong)
    assert main(["bench", "--quick", "--lengths", "512", "--match", "causal"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert "fa3: wrong: rows 0 to 15" in printed


def test_square() -> None:
    assert square(1, 2) == ((1, 1), (2, 2))
