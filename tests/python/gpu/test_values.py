"""Scales, windows, extreme logits, empty rows, NaN that must not spread, real activations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import LOG2_E, Ledger, expect, normal, visible
from prefill import single_prefill_with_kv_cache_return_lse as run
from prefill.data import load_real_activations

DTYPES = (torch.float16, torch.bfloat16)


def inputs(
    qo_len: int,
    kv_len: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(qo_len, heads, head_dim, dtype=dtype),
        normal(kv_len, kv_heads, head_dim, dtype=dtype, seed=1),
        normal(kv_len, kv_heads, head_dim, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(backend: str, dtype: torch.dtype, causal: bool) -> None:
    ledger = Ledger()
    for qo_len, kv_len in ((1, 300), (150, 150), (77, 400), (300, 90), (129, 1000)):
        q, k, v = inputs(qo_len, kv_len, dtype=dtype)
        for window in (0, 1, 2, 5, 63, 64, 65, 127, 128, 129, 200, 255, 999, 5000, 2**40):
            bounds: dict[str, Any] = {"causal": causal, "window_left": window}
            out, lse = run(q, k, v, backend=backend, **bounds)
            label = f"{qo_len} x {kv_len}, window {window}"
            ledger.result(label, out, lse, expect(q, k, v, **bounds))
    ledger.finish()


def test_window_is_inclusive(backend: str) -> None:
    """Eight keys, window 2, causal: row 5 sees the keys 3, 4, 5."""
    q = torch.zeros(8, 1, 64, dtype=torch.float16, device="cuda")
    v = torch.zeros(8, 1, 64, dtype=torch.float16, device="cuda")
    v[torch.arange(8), 0, torch.arange(8)] = 3.0
    out, lse = run(q, q, v, causal=True, window_left=2, backend=backend)
    assert out[5, 0, :8].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    torch.testing.assert_close(lse[5, 0].item(), math.log2(3))


@pytest.mark.parametrize("sm_scale", [0.0, -0.1, 1.0, -1.0, 1e-30, -1e-30, 8.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sm_scale(backend: str, dtype: torch.dtype, sm_scale: float) -> None:
    ledger = Ledger()
    for causal in (False, True):
        q, k, v = inputs(130, 200, dtype=dtype)
        arguments: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale}
        out, lse = run(q, k, v, backend=backend, **arguments)
        ledger.result(f"causal {causal}", out, lse, expect(q, k, v, **arguments))
    ledger.finish()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1e6, 3e7, 1.5e8, 5e8, 1e20, 1e28, 1e30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits(
    backend: str, dtype: torch.dtype, causal: bool, size: float, sign: float
) -> None:
    """Logits of +-size times 1..4: the largest visible one takes all, however low it is."""
    qo_len, kv_len, head_dim = 100, 200, 64
    q = torch.zeros(qo_len, 2, head_dim, dtype=dtype, device="cuda")
    k = torch.zeros(kv_len, 1, head_dim, dtype=dtype, device="cuda")
    q[..., 0] = 1.0
    k[:, 0, 0] = 1.0 + torch.randperm(kv_len, device="cuda") % 101 / 32
    v = normal(kv_len, 1, head_dim, dtype=dtype)
    out, lse = run(q, k, v, causal=causal, sm_scale=sign * size, backend=backend)
    logits = k[:, 0, 0].double() * sign * size
    seen = visible(qo_len, kv_len, causal, -1, "cuda")
    best = torch.where(seen, logits, -math.inf).amax(-1, keepdim=True)
    winners = (seen & (logits == best)).double()
    winners /= winners.sum(-1, keepdim=True)
    expected = winners @ v[:, 0].double()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected[:, None].expand_as(out), rtol=unit, atol=unit)
    torch.testing.assert_close(
        lse.double(), (best * LOG2_E).expand(qo_len, 2), rtol=2.0**-20, atol=0
    )


@pytest.mark.parametrize("low", [3, 100, 1000])
@pytest.mark.parametrize("high", [5, 400, 1001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_thread_on_both_sides_of_2_to_the_18(
    backend: str, dtype: torch.dtype, high: int, low: int
) -> None:
    """A thread holds rows r and r + 8: one's largest logit is 1.7e5, the other's 3.4e5, in base 2.

    Each row has it twice, in KV tiles far apart, and nothing else near it: its weights are 0.5 and
    0.5, its output the mean of two values. `low` and `high` move the first of them, so the two rows
    reach their maxima in different orders.
    """
    qo_len, kv_len, head_dim, last = 256, 2100, 64, 2090
    is_high = torch.arange(qo_len, device="cuda") % 16 >= 8
    q = torch.zeros(qo_len, 1, head_dim, dtype=dtype, device="cuda")
    k = torch.zeros(kv_len, 1, head_dim, dtype=dtype, device="cuda")
    q[is_high, 0, 0] = 1.40625
    q[~is_high, 0, 1] = 0.703125
    k[[high, last], 0, 0] = 1.0
    k[[low, last], 0, 1] = 1.0
    v = torch.randint(-32, 33, (kv_len, 1, head_dim), device="cuda").to(dtype)
    sm_scale = 167772.7
    out, lse = run(q, k, v, sm_scale=sm_scale, backend=backend)
    largest = q[:, 0].sum(-1).double() * sm_scale
    assert (largest[is_high] * LOG2_E > 2.0**18).all()
    assert (largest[~is_high] * LOG2_E < 2.0**18).all()

    expected = expect(q, k, v, sm_scale=sm_scale)
    first = torch.where(is_high, high, low)
    mean = (v[first].double() + v[last].double()) / 2
    assert torch.equal(expected.out, mean)
    # The row's weights may be 2^-7 off 1 before rounding, alike: the quotient keeps its rounding.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), mean, rtol=1.5 * unit, atol=0)
    assert torch.equal(out[is_high].double(), mean[is_high])
    torch.testing.assert_close(lse.double(), (largest * LOG2_E + 1)[:, None], rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("name", ["scale_q", "scale_k"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_as_scale_leaves_rows_without_keys_empty(
    backend: str, dtype: torch.dtype, name: str
) -> None:
    q, k, v = inputs(300, 43, dtype=dtype)
    for scale in (math.nan, torch.full((4 if name == "scale_q" else 2,), math.nan, device="cuda")):
        out, lse = run(q, k, v, causal=True, backend=backend, **{name: scale})
        assert (out[:257] == 0).all()
        assert (lse[:257] == -math.inf).all()
        assert out[257:].isnan().all()
        assert lse[257:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [1, 64, 65, 200])
def test_all_logits_at_minus_60000(backend: str, dtype: torch.dtype, kv_len: int) -> None:
    """Far below any finite stand-in for minus infinity that has been used elsewhere."""
    q = torch.full((100, 4, 64), -32.0, dtype=dtype, device="cuda")
    k = torch.full((kv_len, 2, 64), 29.296875, dtype=dtype, device="cuda")
    v = normal(kv_len, 2, 64, dtype=dtype)
    logit = -32.0 * k[0, 0, 0].item() * 64
    assert -6.1e4 < logit < -5.9e4
    for bounds in ({}, {"causal": True}, {"causal": True, "window_left": 3}):
        out, lse = run(q, k, v, sm_scale=1.0, backend=backend, **bounds)
        seen = visible(
            100, kv_len, bool(bounds.get("causal")), bounds.get("window_left", -1), "cuda"
        )
        count = seen.sum(-1).double()
        mean = (
            torch.einsum("ij,jhd->ihd", seen.double(), v.double())
            / count.clamp(min=1)[:, None, None]
        )
        expected_lse = torch.where(count > 0, logit * LOG2_E + count.log2(), -math.inf)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(
            out.double(), mean.repeat_interleave(2, 1), rtol=unit, atol=2 * unit
        )
        torch.testing.assert_close(
            lse.double(), expected_lse[:, None].expand(100, 4), rtol=2.0**-20, atol=0
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys(backend: str, dtype: torch.dtype) -> None:
    for qo_len, kv_len in ((34, 1), (2, 1), (300, 1), (300, 43), (1000, 129), (129, 128)):
        q, k, v = inputs(qo_len, kv_len, heads=32, kv_heads=32, dtype=dtype)
        for window in (-1, 0, 5):
            out, lse = run(q, k, v, causal=True, window_left=window, backend=backend)
            without = qo_len - kv_len
            assert (out[:without] == 0).all()
            assert (lse[:without] == -math.inf).all()
            assert lse[without:].isfinite().all()
            assert torch.equal(out[without], v[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_keys_that_are_masked_leave_no_trace(backend: str, bad: float) -> None:
    """A row's logits with keys it does not see are computed for the rows beside it."""
    q, k, v = inputs(100, 130)
    clean, clean_lse = run(q, k, v, causal=True, backend=backend)
    future = k.clone()
    future[80:] = bad  # position 80 is that of row 50
    out, lse = run(q, future, v, causal=True, backend=backend)
    assert torch.equal(out[:50], clean[:50])
    assert torch.equal(lse[:50], clean_lse[:50])

    clean, clean_lse = run(q, k, v, causal=True, window_left=20, backend=backend)
    past = k.clone()
    past[:60] = bad  # the window of row 50 begins at key 60
    out, lse = run(q, past, v, causal=True, window_left=20, backend=backend)
    assert torch.equal(out[50:], clean[50:])
    assert torch.equal(lse[50:], clean_lse[50:])


@pytest.mark.parametrize("scale", [1e10, 1e12, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("later", [2.0, 0.0], ids=["steep", "calm"])
def test_later_keys_far_above_huge_logits(backend: str, later: float, scale: float) -> None:
    """Weights relative to the first keys leave float32's range, be the row's maximum huge or 0."""
    q, k, v = inputs(100, 1024, dtype=torch.float16)
    q[:] = 0
    q[:, :, 0] = 1
    k[:] = 0
    k[:128, :, 0] = 1.03125 if later > 0 else -1.03125
    k[128:, :, 0] = later
    out, lse = run(q, k, v, sm_scale=scale, backend=backend)
    mean = v[128:].double().mean(0).repeat_interleave(q.shape[1] // k.shape[1], 0)
    torch.testing.assert_close(out, mean.half().expand_as(out), rtol=2e-3, atol=1e-5)
    expected = later * scale / math.log(2) + math.log2(1024 - 128)
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=1e-4)


def test_nan_reaches_the_rows_that_see_it(backend: str) -> None:
    q, k, v = inputs(100, 100)
    k[60] = math.nan
    out, lse = run(q, k, v, causal=True, backend=backend)
    assert out[60:].isnan().all()
    assert lse[60:].isnan().all()
    assert out[:60].isfinite().all()


SCALES: dict[str, Any] = {
    "scale_q": lambda: torch.rand(4, device="cuda") + 0.5,
    "scale_k": lambda: torch.rand(2, device="cuda") + 0.5,
    "scale_v": lambda: torch.rand(2, device="cuda") + 0.5,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALES)
def test_each_scale_alone(backend: str, name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(130, 200, dtype=dtype)
    ledger = Ledger()
    plain, plain_lse = run(q, k, v, causal=True, backend=backend)
    strided = torch.empty(8, device="cuda")[::2][: len(SCALES[name]())]
    strided.copy_(SCALES[name]())
    for scale in (SCALES[name](), -SCALES[name](), strided, torch.tensor(1.7, device="cuda"), 1.7):
        out, lse = run(q, k, v, causal=True, backend=backend, **{name: scale})
        ledger.result(name, out, lse, expect(q, k, v, causal=True, **{name: scale}))
        assert not torch.equal(out, plain)
        assert torch.equal(lse, plain_lse) == (name == "scale_v")
    ledger.finish()


def test_all_scales_together(backend: str) -> None:
    q, k, v = inputs(130, 200)
    scales = {name: make() for name, make in SCALES.items()}
    k_scale, v_scale = torch.tensor(0.7, device="cuda"), torch.tensor([1.3], device="cuda")
    out, lse = run(
        q, k, v, backend=backend, sm_scale=0.1, k_scale=k_scale, v_scale=v_scale, **scales
    )
    merged = scales | {"scale_k": scales["scale_k"] * 0.7, "scale_v": scales["scale_v"] * 1.3}
    ledger = Ledger()
    ledger.result("tensors", out, lse, expect(q, k, v, sm_scale=0.1, **merged))
    out, lse = run(q, k, v, backend=backend, scale_q=2.0, scale_k=0.5, k_scale=0.7, v_scale=3.0)
    expected = expect(q, k, v, scale_q=2.0, scale_k=0.35, scale_v=3.0)
    ledger.result("floats", out, lse, expected)
    ledger.finish()


def test_lse_bases(backend: str) -> None:
    q, k, v = inputs(100, 60)
    out, base_2 = run(q, k, v, causal=True, backend=backend)
    other, base_e = run(q, k, v, causal=True, backend=backend, lse_base="e")
    assert torch.equal(out, other)
    torch.testing.assert_close(base_e, base_2 * math.log(2.0))
    assert (base_e[:40] == -math.inf).all()


def test_backends_have_one_lse_unit(backend: str) -> None:
    q, k, v = inputs(100, 300)
    _, lse = run(q, k, v, causal=True, backend=backend)
    for other in ("auto", "reference"):
        _, other_lse = run(q, k, v, causal=True, backend=other)
        torch.testing.assert_close(lse, other_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("length", [1, 17, 128, 192, 300, 511, 512])
def test_real_activations(backend: str, length: int) -> None:
    real = load_real_activations()
    q, k, v = (x[:length].cuda() for x in (real.q, real.k, real.v))
    out, lse = run(q, k, v, causal=True, sm_scale=real.sm_scale, backend=backend)
    expected = expect(q, k, v, causal=True, sm_scale=real.sm_scale)
    torch.testing.assert_close(
        expected.out.float(), real.o_ref[:length].cuda(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        expected.lse.float(), real.lse2_ref[:length].cuda(), rtol=1e-5, atol=1e-6
    )
    ledger = Ledger()
    ledger.result("float16", out, lse, expected)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out, lse = run(q, k, v, causal=True, sm_scale=real.sm_scale, backend=backend)
    expected = expect(q, k, v, causal=True, sm_scale=real.sm_scale)
    ledger.result("bfloat16", out, lse, expected)
    ledger.finish()
