"""What the fuzzer allows: the roundings of a kernel, and not those of a worse one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from combinations import Seeded
from fakes import StubKernel, pretend
from float32_kernel import Float32Kernel
from fuzz_cases import fuzz_case
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
