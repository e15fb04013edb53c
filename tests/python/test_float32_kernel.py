"""What the fuzzer allows: the roundings of a kernel, and not those of a worse one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from combinations import Seeded
from fakes import StubKernel, pretend
from float32_kernel import Float32Kernel
from fuzz_cases import FuzzCase, fuzz_case, fuzzed
from fuzz_check import outcome


def failures(kind: type[StubKernel], monkeypatch: pytest.MonkeyPatch, cases: int) -> list[str]:
    pretend(monkeypatch, kind=kind)
    found = []
    for number in range(cases):
        case = fuzz_case(Seeded(number), ("fa2", "fa3"), longest=120, scores=30_000)
        result = outcome(case, "cpu")
        if result.is_failure:
            found.append(f"{result}: {case}")
    return found


E4M3 = (torch.float8_e4m3fn,) * 3
LUCK = [
    fuzzed(
        dtypes=E4M3,
        qo_len=70,
        kv_len=65,
        window_left=7,
        soft_cap=30.0,
        position="RoPE, scaled",
        sm_scale=-0.2,
        k_scale="float",
        v_scale="element",
        kv_heads=1,
        stray=("v", "-inf", 0.8265717342702991),
    ),
    fuzzed(
        dtypes=E4M3,
        head_dims=(16, 200),
        group=8,
        qo_len=27,
        kv_len=21,
        mask="causal",
        position="RoPE, scaled",
        scale_k="float",
        k_scale="element",
        v_scale="float",
        o_dtype="other 16 bits",
        kv_heads=3,
        stray=("v", "inf", 0.9128714742547137),
    ),
]
"""Of e4m3, whose infinity is 448: the errors of one channel are those of a few weights."""


@pytest.mark.parametrize("case", LUCK)
def test_a_value_that_dwarfs_the_others(case: FuzzCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel is held to its own bounds, so that a fault there is seen."""
    pretend(monkeypatch, kind=Float32Kernel)
    assert outcome(case, "cpu").kind == "passed"
    pretend(monkeypatch, kind=WeightsOfFewBits)
    assert "beyond its arithmetic" in outcome(case, "cpu").text


HARD = {
    "a scale of 0 and an infinite key": fuzzed(
        qo_len=2, kv_len=1, sm_scale=0.0, kv_heads=1, stray=("k", "-inf", 0.75)
    ),
    "capped logits of 90, float32": fuzzed(
        head_dims=(80, 80),
        group=3,
        qo_len=408,
        kv_len=671,
        dtypes=(torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fn),
        mask="packed",
        mask_share=1.0,
        soft_cap=92.63574440348478,
        position="ALiBi, slopes",
        sm_scale=-2.247589738975437,
        scale_k="per head",
        o_dtype="float32",
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_cases_that_once_failed_for_no_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind=Float32Kernel)
    result = outcome(HARD[name], "cpu")
    assert result.kind == "passed", result.text


class WeightsOfFewBits(Float32Kernel):
    def rounded(self, weights: Tensor, half: torch.dtype) -> Tensor:
        return weights.to(torch.float8_e4m3fn).float()


class CoarseTanh(Float32Kernel):
    tanh_error = 6.0


class WeightsOfBfloat16(Float32Kernel):
    def rounded(self, weights: Tensor, half: torch.dtype) -> Tensor:
        return weights.bfloat16().float()


class WeightsCut(Float32Kernel):
    """Cut instead of rounded: off by twice as much, and all one way."""

    def rounded(self, weights: Tensor, half: torch.dtype) -> Tensor:
        lost = {torch.float16: 13, torch.bfloat16: 16}[half]
        return (weights.view(torch.int32) >> lost << lost).view(torch.float32)


def test_roundings_of_a_kernel_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(Float32Kernel, monkeypatch, 300) == []


@pytest.mark.parametrize("kind", [CoarseTanh, WeightsOfBfloat16, WeightsCut])
def test_worse_roundings_fail(kind: type[StubKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(failures(kind, monkeypatch, 150)) > 2
