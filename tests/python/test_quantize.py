"""`quantize_per_head`: its formula, its edges, and what attention makes of the result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from layouts import COPIED, IN_PLACE, relaid
from naive import naive_attention
from prefill import quantize_per_head, single_prefill_with_kv_cache

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def dequantized(tensor: Tensor, scale: Tensor) -> Tensor:
    return tensor.double() * scale.double()[:, None]


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FP8)
def test_within_half_a_step(dtype: torch.dtype, source: torch.dtype) -> None:
    x = (torch.randn(50, 3, 40) * torch.tensor([1e-3, 1.0, 300.0])[:, None]).to(source)
    tensor, scale = quantize_per_head(x, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == x.shape
    assert scale.dtype == torch.float32
    assert scale.shape == (3,)
    largest = torch.finfo(dtype).max
    torch.testing.assert_close(scale, x.float().abs().amax((0, 2)) / largest, rtol=2e-7, atol=0)
    assert (tensor.float().abs().amax((0, 2)) == largest).all()
    step = torch.finfo(dtype).eps * x.double().abs()
    subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    step = torch.maximum(step, subnormal * scale.double()[:, None])
    error = (dequantized(tensor, scale) - x.double()).abs()
    assert (error <= step / 2 * (1 + 1e-6)).all()
    assert error.amax() > 0  # and it did round


def test_heads_do_not_share_a_scale() -> None:
    x = torch.randn(20, 4, 16)
    alone = [quantize_per_head(x[:, h : h + 1]) for h in range(4)]
    tensor, scale = quantize_per_head(x)
    assert torch.equal(bits(tensor), bits(torch.cat([t for t, _ in alone], 1)))
    assert torch.equal(scale, torch.cat([s for _, s in alone]))
    assert len(scale.unique()) == 4


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED])
def test_layouts(layout: str) -> None:
    x = torch.randn(30, 3, 16)
    tensor, scale = quantize_per_head(x)
    moved, moved_scale = quantize_per_head(relaid(x, layout))
    assert torch.equal(bits(moved.contiguous()), bits(tensor))
    assert torch.equal(moved_scale, scale)
    hnd, hnd_scale = quantize_per_head(relaid(x, layout).transpose(0, 1), kv_layout="HND")
    assert hnd.shape == (3, 30, 16)
    assert torch.equal(bits(hnd.transpose(0, 1).contiguous()), bits(tensor))
    assert torch.equal(hnd_scale, scale)


@pytest.mark.parametrize("dtype", FP8)
def test_zeros_and_extremes(dtype: torch.dtype) -> None:
    largest = torch.finfo(torch.float32).max
    sizes = torch.tensor([0.0, largest, 1e-38, 1e-44])
    x = torch.linspace(-1.0, 1.0, 41)[:, None, None] * sizes[None, :, None]
    tensor, scale = quantize_per_head(x, dtype)
    assert scale[0] == 1.0
    assert (tensor[:, 0].float() == 0).all()
    assert tensor.float().isfinite().all()
    assert scale.isfinite().all()
    assert (scale > 0).all()
    eps = torch.finfo(dtype).eps
    exact = x[:, 1].double()
    torch.testing.assert_close(
        dequantized(tensor, scale)[:, 1], exact, rtol=eps / 2, atol=1e-5 * largest
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FP8)
def test_nan_and_infinity_become_nan_and_stay_alone(
    dtype: torch.dtype, source: torch.dtype, bad: float
) -> None:
    x = torch.randn(10, 2, 8).to(source)
    x[4, 1, 2] = 0.0
    clean, clean_scale = quantize_per_head(x, dtype)
    x[4, 1, 2] = bad
    tensor, scale = quantize_per_head(x, dtype)
    assert torch.equal(scale, clean_scale)
    assert tensor.float().isnan().nonzero().tolist() == [[4, 1, 2]]
    others = torch.ones(x.shape, dtype=torch.bool)
    others[4, 1, 2] = False
    assert torch.equal(bits(tensor)[others], bits(clean)[others])


@pytest.mark.parametrize("shape", [(0, 3, 16), (5, 0, 16), (0, 0, 8)])
def test_empty(shape: tuple[int, int, int]) -> None:
    tensor, scale = quantize_per_head(torch.zeros(shape))
    assert tensor.shape == shape
    assert tensor.dtype == E4M3
    assert torch.equal(scale, torch.ones(shape[1]))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", FP8)
def test_compiles_whole(dtype: torch.dtype, compiler: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(7, 3, 16).half()
    x[0, 0, 0], x[1, 0, 0], x[:, 2] = math.nan, math.inf, 0.0
    compiled: Any = torch.compile(quantize_per_head, fullgraph=True, backend=compiler)
    for given, layout in ((x, "NHD"), (x.transpose(0, 1), "HND")):
        tensor, scale = compiled(given, dtype, layout)
        plain, plain_scale = quantize_per_head(given, dtype, layout)
        assert torch.equal(bits(tensor.contiguous()), bits(plain.contiguous()))
        assert torch.equal(scale, plain_scale)


def test_nothing_reads_the_device() -> None:
    """Fake CUDA tensors have no values: whatever read one would fail."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.empty(7, 3, 16, dtype=torch.bfloat16, device="cuda")
        tensor, scale = quantize_per_head(x)
        assert tensor.device == scale.device == x.device
        assert tensor.dtype == E4M3


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_goes_straight_into_attention(kv_layout: str, dtype: torch.dtype) -> None:
    """Head by head sizes that differ a thousandfold: only with its scales is the result right."""
    sizes = torch.tensor([0.1, 100.0])[:, None]
    q, k, v = torch.randn(20, 4, 64), torch.randn(90, 2, 64) / sizes, torch.randn(90, 2, 64) * sizes
    q = q * sizes.repeat_interleave(2, 0)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    q8, scale_q = quantize_per_head(q, dtype)
    k8, scale_k = quantize_per_head(k, dtype, kv_layout)
    v8, scale_v = quantize_per_head(v, dtype, kv_layout)
    out, lse = single_prefill_with_kv_cache(
        *(q8, k8, v8, scale_q, scale_k, scale_v),
        o_dtype=torch.float32,
        causal=True,
        kv_layout=kv_layout,
        return_lse=True,
    )

    def widened(tensor: Tensor, scale: Tensor, layout: str) -> Tensor:
        return (
            tensor.double() * scale.double()[(..., None, None) if layout == "HND" else (..., None)]
        )

    exact, exact_lse = naive_attention(
        widened(q8, scale_q, "NHD"),
        widened(k8, scale_k, kv_layout),
        widened(v8, scale_v, kv_layout),
        causal=True,
        kv_layout=kv_layout,
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    untouched, _ = naive_attention(q, k, v, causal=True, kv_layout=kv_layout)
    size = untouched.square().mean((0, 2)).sqrt()[:, None]
    rms = ((exact - untouched) / size).square().mean().sqrt()
    assert 0.01 < rms < (0.1 if dtype == E4M3 else 0.2)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, r"x is \[1.0\] of type list; expected a torch.Tensor"),
    ({"x": torch.zeros(2, 2, 8).to_sparse()}, TypeError, "expected a dense tensor"),
    ({"x": torch.zeros(2, 8)}, ValueError, r"shape \(2, 8\); expected three dimensions, \[length"),
    (
        {"x": torch.zeros(1, 2, 2, 8), "kv_layout": "HND"},
        ValueError,
        r"\[heads, length, head_dim\].*squeeze\(0\)",
    ),
    (
        {"x": torch.zeros(2, 2, 8, dtype=torch.float64)},
        TypeError,
        r"float64; expected one of.*\.fl",
    ),
    ({"x": torch.zeros(2, 2, 8).to(E4M3)}, TypeError, "quantised already"),
    (
        {"dtype": torch.float16},
        TypeError,
        "dtype is torch.float16; expected torch.float8_e4m3fn or",
    ),
    ({"dtype": "float8_e4m3fn"}, TypeError, "of type str; expected torch.float8_e4m3fn or"),
    ({"kv_layout": "nhd"}, ValueError, "kv_layout='nhd' is unknown; expected one of 'NHD', 'HND'"),
    ({"kv_layout": None}, TypeError, "kv_layout is None of type NoneType"),
    (
        {"x": torch.zeros(2, 2, 8, requires_grad=True)},
        NotImplementedError,
        r"x requires grad, and rounding .*detach\(\)",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), WRONG)
def test_refusals(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        quantize_per_head(**{"x": torch.zeros(2, 2, 8), **arguments})


def test_grad_mode_off_is_enough() -> None:
    x = torch.randn(2, 2, 8, requires_grad=True)
    with torch.no_grad():
        tensor, scale = quantize_per_head(x)
    assert not tensor.requires_grad
    assert not scale.requires_grad
