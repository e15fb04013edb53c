"""Other libraries in `python -m prefill bench`, by stand-ins for their modules."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from bench_cases import CAUSAL, CPU, FEATURES, FEW_HEADS, SQUARE, small
from fake_peers import FakeCudnn, FakeFlashAttention4, hide, install
from prefill.bench import contenders, machine
from prefill.bench.cases import (
    FULL_AND_CAUSAL,
    GRIDS,
    Case,
    Heads,
    Inputs,
    Length,
    Variant,
    expand,
    quantised,
    quantised_whole,
    random_sinks,
)
from prefill.bench.check import Checker

HOPPER, BLACKWELL = (9, 0), (10, 0)
MIXED_DIMS = Heads(2, 2, 192, 128)
WHOLE = {kind: quantised_whole(kind, **FULL_AND_CAUSAL[kind].arguments) for kind in FULL_AND_CAUSAL}


def made(case: Case, seed: int = 0) -> Inputs:
    return case.inputs(CPU, case.arguments(CPU), seed)


def problem_of(contender: contenders.Contender, case: Case, inputs: Inputs) -> str:
    """What the check finds in the contender's result."""
    out = contender.as_nhd(contender.prepare(case, inputs)())
    return Checker(case, inputs).problem(out, contender.dtype(case, inputs))


def refusal(contender: contenders.Contender, case: Case) -> str:
    out, reason = contenders.attempt(contender, lambda: contender.prepare(case, made(case)))
    assert out is None
    return reason


def test_other_libraries_are_there_where_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["fa3", "fa2", "cudnn", "flash"]
    hide(monkeypatch, "flash_attn", "cudnn", "flashinfer")
    assert list(contenders.available()) == own
    install(monkeypatch, "flash_attn", __path__=[])  # another version of it, without kernels of 4
    assert list(contenders.available()) == own
    FakeFlashAttention4(monkeypatch)
    FakeCudnn(monkeypatch, HOPPER)
    install(monkeypatch, "flashinfer")
    found = contenders.available()
    assert list(found) == [*own, "flash4", "cudnn8", "flashinfer"]
    assert all(name == contender.name for name, contender in found.items())


def test_their_versions_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flash-attn-4": "4.0", "nvidia-cudnn-frontend": "1.32"}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    told = machine.software()
    assert (told["flash_attn_4"], told["cudnn_frontend"]) == ("4.0", "1.32")
    assert told["flashinfer"] is None


@pytest.mark.parametrize("length", [SQUARE, Length(40, 200), Length(1, 96)])
@pytest.mark.parametrize(
    "variant",
    [
        *FULL_AND_CAUSAL.values(),
        Variant({"causal": True, "window_left": 9}),
        Variant({"window_left": 9}),
        Variant({"window_left": -1}),
        Variant({"causal": True, "logits_soft_cap": 1.5}),
        Variant({"causal": True, "sinks": random_sinks}),
        Variant({"causal": True, "sm_scale": 0.3}),
    ],
)
def test_flash4_computes_the_case(
    monkeypatch: pytest.MonkeyPatch, variant: Variant, length: Length
) -> None:
    fake = FakeFlashAttention4(monkeypatch)
    for heads in (FEW_HEADS, MIXED_DIMS):
        case = small(variant, length, heads)
        inputs = made(case)
        assert problem_of(contenders.FlashAttention4(), case, inputs) == ""
        given = fake.calls[-1]
        assert given["q"].shape == (1, length.qo, heads.qo, heads.dim_qk)
        assert given["v"].shape == (1, length.kv, heads.kv, heads.dim_vo)
        assert given["k"].data_ptr() == inputs.k.data_ptr()  # no copy is timed


def test_flash4_is_given_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlashAttention4(monkeypatch)
    case = small(
        Variant({"causal": True, "window_left": 7, "logits_soft_cap": 30.0, "sm_scale": 0.5})
    )
    contenders.FlashAttention4().prepare(case, made(case))()
    given = fake.calls[-1]
    assert (given["causal"], given["window_size"]) == (True, (7, None))
    assert (given["softcap"], given["softmax_scale"]) == (30.0, 0.5)


def test_flash4_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFlashAttention4(monkeypatch)
    flash4 = contenders.FlashAttention4()
    reasons = {
        "d128 16k ALiBi": "FlashAttention-4 has no pos_encoding_mode",
        "d128 4k RoPE": "FlashAttention-4 has no pos_encoding_mode",
        "d128 16k mask tril": "FlashAttention-4 has no packed_custom_mask",
        "d128 16k mask tril, bool": "FlashAttention-4 has no custom_mask",
    }
    for name, text in reasons.items():
        variant = next(case.variant for case in FEATURES if case.name == name)
        assert text in refusal(flash4, small(variant))
    for variant in (quantised("qkv", "full"), quantised("kv", "full"), WHOLE["full"]):
        assert "FlashAttention-4 has no float8" in refusal(flash4, small(variant))
    assert fake.calls == []


@pytest.mark.parametrize("heads", [FEW_HEADS, MIXED_DIMS])
@pytest.mark.parametrize("length", [SQUARE, Length(40, 200), Length(1, 96)])
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_cudnn8_computes_the_case(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    kind: str,
    length: Length,
    heads: Heads,
) -> None:
    fake = FakeCudnn(monkeypatch, capability)
    case = small(WHOLE[kind], length, heads)
    cudnn8 = contenders.CudnnFloat8()
    assert problem_of(cudnn8, case, made(case)) == ""
    scales = fake.scales[-1]
    assert scales == pytest.approx(
        {
            **{"descale_q": 1.5, "descale_k": 0.75, "descale_v": 1.6},
            **{"scale_s": 448.0, "descale_s": 1 / 448, "scale_o": 1.0},
        }
    )
    assert cudnn8.dtype(case, made(case)) == torch.float8_e4m3fn
    out = cudnn8.prepare(case, made(case))()
    assert out.dtype == (torch.float8_e4m3fn if capability == HOPPER else torch.bfloat16)


def test_cudnn8_takes_its_multipliers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out where none is given; sm_scale too."""
    fake = FakeCudnn(monkeypatch, HOPPER)
    for arguments in ({}, {"sm_scale": 0.3}, {"scale_k": 2.0}):
        case = small(Variant({"causal": True, **arguments}, float8="qkv"))
        assert problem_of(contenders.CudnnFloat8(), case, made(case)) == ""
        assert fake.scales[-1]["descale_k"] == arguments.get("scale_k", 1.0)


def test_the_check_sees_a_scale_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCudnn(monkeypatch, HOPPER)
    case = small(WHOLE["causal"])
    inputs = made(case)
    unscaled = Inputs(inputs.q, inputs.k, inputs.v, {"causal": True})
    out = contenders.CudnnFloat8().prepare(case, unscaled)()
    assert "times the tolerance" in Checker(case, inputs).problem(out, torch.float8_e4m3fn)
    out.fill_(torch.nan)
    assert "NaN" in Checker(case, inputs).problem(out, torch.float8_e4m3fn)


def test_cudnn8_aligns_its_mask_to_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first key, which Hopper takes, only where that is the same."""
    fake = FakeCudnn(monkeypatch, HOPPER)
    alignments = {
        SQUARE: ("TOP_LEFT", 0),
        Length(16, 96): ("BOTTOM_RIGHT", 0),
        Length(1, 96): (None, None),
    }
    for length, expected in alignments.items():
        case = small(WHOLE["causal"], length)
        contenders.CudnnFloat8().prepare(case, made(case))
        node = fake.graphs[-1].node
        assert (node.get("diagonal_alignment"), node.get("right_bound")) == expected


def test_cudnn8_builds_a_graph_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCudnn(monkeypatch, HOPPER)
    cudnn8 = contenders.CudnnFloat8()
    for number, kind in enumerate(WHOLE, 1):
        case = small(WHOLE[kind])
        arguments = case.arguments(CPU)
        calls = [cudnn8.prepare(case, case.inputs(CPU, arguments, seed)) for seed in range(2)]
        assert len(fake.graphs) == number
        first, second = (call() for call in calls)
        assert not torch.equal(first.float(), second.float())
        assert calls[0]() is first  # into an output that is there
        assert fake.executed[-3:] == [fake.graphs[-1]] * 3
    assert len(fake.handles) == 1
    assert set(fake.streams) == {77}
    assert fake.graphs[0].modes == ["A", "FALLBACK"]
    assert fake.graphs[0].node["generate_stats"] is False


def test_cudnn8_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCudnn(monkeypatch, HOPPER)
    by_head = "has no scale_q, scale_k, scale_v by head"
    capped = Variant({"logits_soft_cap": 30.0}, float8="qkv")
    for variant, text in (
        (CAUSAL, "is for float8_e4m3fn q, k and v"),
        (quantised("kv", "full"), "is for float8_e4m3fn q, k and v"),
        (quantised("qkv", "full"), by_head),
        (capped, "has no logits_soft_cap"),
    ):
        assert text in refusal(contenders.CudnnFloat8(), small(variant))
    assert fake.graphs == fake.handles == []


def test_cudnn8_has_cases_in_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCudnn(monkeypatch, HOPPER)
    ran = []
    for case in expand(GRIDS["fp8"]):
        less = small(case.variant, heads=case.heads)
        cudnn8 = contenders.CudnnFloat8()
        out, _ = contenders.attempt(cudnn8, lambda c=less, by=cudnn8: by.prepare(c, made(c)))
        ran += [case.variant_name] * (out is not None)
    assert set(ran) == {"full float8 by tensor", "causal float8 by tensor"}
    assert len(ran) == 12
