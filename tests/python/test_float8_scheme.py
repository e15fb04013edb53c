"""What kernels that multiply in float8 are held against: it lets them pass, and no worse ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import float8_inputs
from cases import BFLOAT16, E4M3, E5M2
from combinations import Seeded
from exactness import normal
from fakes import StubKernel, pretend
from float8_inputs import Inputs, drawn, errors, real
from float8_scheme import LARGEST, OF_SUMS, UNIT, attend, cut, cut_product, e4m3
from float32_kernel import Float32Kernel, multiplies_in_float8
from fuzz_cases import FuzzCase, fuzz_case, fuzzed
from fuzz_check import make_inputs, outcome
from layouts import COPIED, IN_PLACE
from prefill import explain, single_prefill_with_kv_cache

RMS, MAX = 1.02, 2.0


class CoarseWeights(Float32Kernel):
    """Of two bits of fraction."""

    def in_e4m3(self, weights: Tensor) -> Tensor:
        return (weights * LARGEST).to(E5M2).float()


class WeightsUpToOne(Float32Kernel):
    """Not moved to where e4m3 has its range: those under 2^-9 are lost."""

    def in_e4m3(self, weights: Tensor) -> Tensor:
        return e4m3(weights) * LARGEST


class WeightsCut(Float32Kernel):
    def in_e4m3(self, weights: Tensor) -> Tensor:
        return ((weights * LARGEST).view(torch.int32) >> 20 << 20).view(torch.float32)


class SumsOfFewBits(Float32Kernel):
    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return cut_product(a, b, fraction=9)


class OneSum(Float32Kernel):
    """All keys in one sum, which loses what it is cut by."""

    tile = 1 << 20


def native_case(number: int) -> FuzzCase:
    """A case that fa3 takes in float8."""
    draw = Seeded(number)
    case = fuzz_case(draw, ("fa3",), longest=300, scores=60_000)
    dims = (16 * draw.integer(5, 8), 16 * draw.integer(1, 8))
    position = "none" if case.position.startswith("RoPE") else case.position
    dtypes = (draw.choice((E4M3, E5M2)),) * 3
    words = {"dtypes": dtypes, "head_dims": dims, "position": position}
    return replace(case, **words, broken=None, fp16_reduction=False)


def failures(kind: type[StubKernel], monkeypatch: pytest.MonkeyPatch, cases: int) -> list[str]:
    pretend(monkeypatch, kind=kind)
    found = [(case, outcome(case, "cpu")) for case in map(native_case, range(cases))]
    return [f"{result}: {case}" for case, result in found if result.is_failure]


def test_what_kernels_lose_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(Float32Kernel, monkeypatch, 250) == []


@pytest.mark.parametrize("kind", [CoarseWeights, WeightsUpToOne, WeightsCut, SumsOfFewBits])
def test_worse_kernels_fail(kind: type[StubKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(failures(kind, monkeypatch, 120)) > 2


def run(*tensors: Tensor, **arguments: Any) -> Tensor:
    out: Tensor = single_prefill_with_kv_cache(*tensors, backend="fa3", **arguments)
    return out


INPUTS = {
    "normal": partial(drawn, (100, 900), (128, 128)),
    "outliers": partial(drawn, (100, 900), (128, 128), outliers=float8_inputs.OUTLIERS),
    "real": real,
}


def excess(inputs: Inputs, product: Any) -> tuple[float, float]:
    """RMS and largest error over those of the scheme in the stand-in's tiles."""
    ours, scheme = errors(inputs, run, True, BFLOAT16, Float32Kernel.tile, product)
    return ours.rms / scheme.rms, ours.largest / scheme.largest


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", INPUTS)
def test_errors_beside_those_of_the_scheme(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """Cut sums show beside outliers: there the scheme's are cut too."""
    inputs = INPUTS[name](dtype=dtype, device="cpu")
    product = cut_product if name == "outliers" else torch.matmul
    for kind, is_right in ((Float32Kernel, True), (CoarseWeights, False), (WeightsCut, False)):
        pretend(monkeypatch, kind=kind)
        rms, largest = excess(inputs, product)
        assert (rms <= RMS and largest <= MAX) == is_right, (kind, rms, largest)


@pytest.mark.parametrize(("kind", "is_right"), [(Float32Kernel, True), (OneSum, False)])
def test_flat_scores_show_sums_that_are_cut(
    monkeypatch: pytest.MonkeyPatch, kind: type[StubKernel], is_right: bool
) -> None:
    pretend(monkeypatch, kind=kind)
    q, k, v = (normal(n, 1, 80, dtype=E4M3, device="cpu") for n in (2, 32768, 32768))
    v = (v.float() + 3.0).to(E4M3)
    mean = v.double().mean(0)
    out = run(q, k, v, sm_scale=0.0, o_dtype=torch.float32)
    assert (((out - mean) / mean).abs().amax().item() <= 2.0**-8) == is_right


def test_the_scheme() -> None:
    """Equal weights are exact; others are off by their rounding; a sink takes its share."""
    values = normal(2, 300, 16, dtype=torch.float32, device="cpu")
    logits = torch.zeros(2, 5, 300)
    no_sink = torch.full((2, 5, 1), -math.inf)
    mean = values.mean(1, keepdim=True).expand(2, 5, 16)
    torch.testing.assert_close(attend(logits, values, no_sink), mean, rtol=1e-5, atol=1e-6)
    as_many = torch.full((2, 5, 1), math.log(300.0))
    torch.testing.assert_close(attend(logits, values, as_many), mean / 2, rtol=1e-5, atol=1e-6)
    logits = 3 * normal(2, 5, 300, dtype=torch.float32, seed=1, device="cpu")
    logits[:, 0, 128:] = -math.inf  # its first tiles show it nothing
    weights = torch.softmax(logits.double(), -1)
    error = (attend(logits, values, no_sink) - weights @ values.double()).abs()
    assert (error <= UNIT * (weights @ values.double().abs()) + 1e-4).all()
    assert error.amax() > 1e-3
    logits[:, 1] = -math.inf
    assert attend(logits, values, no_sink)[:, 1].isnan().all()
    assert (attend(logits, values, torch.zeros(2, 5, 1))[:, 1] == 0).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cut_sums_stay_within_what_they_may_lose(dtype: torch.dtype) -> None:
    """Random numbers, numbers of one sign, outliers; and the bound is no wider than it must be."""
    for head_dim in (16, 64, 128, 256):
        q, k = (normal(2, 200, head_dim, dtype=dtype, seed=n, device="cpu") for n in (0, 1))
        large = drawn((200, 200), (head_dim, 16), dtype, "cpu", 0.01).tensors
        for a, b in (
            (q, k),
            (q.float().abs().to(dtype), k.float().abs().to(dtype)),
            (large[0].transpose(0, 1), large[1].transpose(0, 1).repeat_interleave(2, 0)),
        ):
            a32, b32 = a.float(), b.float()
            error = (cut_product(a32, b32.mT).double() - a32.double() @ b32.double().mT).abs()
            bound = cut(a, b)
            assert (bound >= 2.0**-12 * (a32.double().abs() @ b32.double().abs().mT)).all()
            assert (error <= bound).all()
            assert (error / bound).amax() > 0.1


def test_coarse_numbers_lose_nothing() -> None:
    q = torch.tensor([[[0.25, -7.0, 3.5, 0.0]]])
    k = torch.tensor([[[4.0, 0.5, -1.0, 448.0]]])
    for x in (q, k):
        assert torch.equal(x.to(E4M3).float(), x)
    assert (cut(q.to(E4M3), k.to(E4M3)) == 0).all()
    k[..., 0] = 2.0**-9
    assert (cut(q.to(E4M3), k.to(E4M3)) > 0).all()


def test_sums_of_a_tile_stay_within_what_they_may_lose() -> None:
    for keys in (96, 128, 192, 256):
        scores = normal(1, 50, keys, dtype=torch.float32, device="cpu")
        weights = e4m3(LARGEST * scores.abs().neg().exp())
        values = e4m3(normal(1, keys, 32, dtype=torch.float32, seed=1, device="cpu").abs())
        exact = weights.double() @ values.double()
        error = (cut_product(weights, values).double() - exact).abs()
        assert (error <= OF_SUMS * exact).all()
        assert (error / exact).amax() > OF_SUMS / 50


class Noting(StubKernel):
    """Keeps what the op's own rule says."""

    def __call__(self, backend: str, *tensors: Any) -> None:
        q, k, v = tensors[:3]
        self.calls.append({"native": multiplies_in_float8(backend, q, k, v, tensors[14])})


@pytest.mark.parametrize("layout", ["dense", *IN_PLACE, *COPIED])
def test_explain_knows_what_the_op_will_do(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Wherever tensors lie: what is copied is dense when the op sees it."""
    stub = pretend(monkeypatch, kind=Noting)
    seen = set()
    dims = ((64, 64), (72, 64), (64, 40), (128, 96), (192, 128), (256, 256), (144, 144))
    dtypes = ((E4M3, E4M3, E4M3), (E5M2, E5M2, E5M2), (E4M3, E5M2, E4M3))
    layouts = ((layout,) * 3, ("dense", layout, "dense"), ("fused", "dense", layout))
    positions = ("none", "ALiBi", "RoPE")
    names = ("backend", "head_dims", "dtypes", "position", "layouts")
    for words in itertools.product(("fa2", "fa3"), dims, dtypes, positions, layouts):
        case = fuzzed(qo_len=5, kv_len=9, **dict(zip(names, words, strict=True)))
        call = make_inputs(case, "cpu").call
        told = explain(*call.tensors, backend=case.backend, **call.arguments)
        single_prefill_with_kv_cache(*call.tensors, backend=case.backend, **call.arguments)
        native = stub.calls[-1]["native"]
        assert (told.dtype == str(case.dtypes[0]).removeprefix("torch.")) == native, case
        seen.add((case.backend, native))
    assert seen == {("fa2", False), ("fa3", False), ("fa3", True)}
