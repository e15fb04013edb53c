"""The cases of `python -m prefill bench`: grids, masks, filters, counts."""

from __future__ import annotations

import math

import pytest
import torch

import prefill
from bench_cases import APPEND, CAUSAL, CORE, CPU, FEATURES, MASKS, SQUARE, small
from prefill.bench import masks
from prefill.bench.cases import (
    FULL_AND_CAUSAL,
    GRIDS,
    Case,
    Grid,
    Heads,
    Length,
    Variant,
    expand,
    masked,
    parse_lengths,
    select,
    square,
)
from prefill.bench.masks import visible_pairs


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
    kinds += ["full float8 by tensor", "causal float8 by tensor"]
    of_d128 = [*kinds, "full float8 kv", "causal float8 kv"]
    assert list(cases) == [
        *(f"d128 {length} {kind}" for kind in of_d128 for length in ("2k", "8k", "16k")),
        *(f"{dims} 8k {kind}" for dims in ("d64", "d256", "d192/128") for kind in kinds),
    ]
    for name, case in cases.items():
        plain = name.partition(" float8")[0]
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
    by_tensor = cases["d128 8k causal float8 by tensor"]
    assert by_tensor.dtypes == whole.dtypes
    assert set(by_tensor.arguments(CPU)) == set(whole.arguments(CPU))
    scales = [by_tensor.arguments(CPU)[f"scale_{name}"] for name in "qkv"]
    assert all(isinstance(scale, float) and scale != 1.0 for scale in scales)
    assert (whole.describe()["float8"], mixed.describe()["float8"]) == ("qkv", "kv")


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


def test_square() -> None:
    assert square(1, 2) == ((1, 1), (2, 2))
