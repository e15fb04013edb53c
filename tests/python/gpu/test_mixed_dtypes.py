"""fp16 and bf16 queries over fp8 keys and values, which a pass widens before the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import exactness
from cases import random_mask
from exactness import Ledger, expect, guarded
from prefill import explain
from prefill import single_prefill_with_kv_cache_return_lse as run

DTYPES = (torch.float16, torch.bfloat16)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = [(E4M3, E4M3), (E5M2, E5M2), (E4M3, E5M2)]
HEAD_DIMS = [(64, 64), (72, 40), (80, 96), (128, 128), (192, 128), (200, 216), (256, 256), (136, 8)]
LENGTHS = ((1, 1), (1, 333), (65, 77), (130, 261), (300, 90), (129, 1003))


def inputs(
    qo_len: int,
    kv_len: int,
    head_dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float16,
    fp8: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    heads: tuple[int, int] = (4, 2),
) -> tuple[Tensor, Tensor, Tensor]:
    return exactness.inputs(qo_len, kv_len, head_dims, dtype, heads, fp8)


def poisoned(tensor: Tensor, rows: int = 160, columns: int = 8) -> Tensor:
    """The same fp8 values, amid NaN: rows after the last, columns after the head dim."""
    length, heads, head_dim = tensor.shape
    shape = (length + rows, heads, head_dim + columns)
    buffer = torch.full(shape, 0x7F, dtype=torch.uint8, device=tensor.device)
    buffer[:length, :, :head_dim] = tensor.view(torch.uint8)
    return buffer.view(tensor.dtype)[:length, :, :head_dim]


def compare(ledger: Ledger, label: str, backend: str, *tensors: Tensor, **arguments: Any) -> None:
    assert explain(*tensors, backend=backend, **arguments).backend == backend
    out, lse = run(*tensors, backend=backend, **arguments)
    assert out.dtype == tensors[0].dtype
    ledger.result(label, out, lse, expect(*tensors, **arguments))


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_keys(
    backend: str,
    dtype: torch.dtype,
    fp8: tuple[torch.dtype, torch.dtype],
    head_dims: tuple[int, int],
) -> None:
    ledger = Ledger()
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype, fp8)
        for more in ({}, {"causal": True}, {"causal": True, "window_left": 33}):
            label = f"{qo_len} x {kv_len}, {more}"
            compare(ledger, label, backend, q, k, v, **more)
    ledger.finish()


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_as_16_bit_inputs(
    backend: str, dtype: torch.dtype, fp8: tuple[torch.dtype, torch.dtype]
) -> None:
    """Widening is exact: the kernel cannot tell."""
    for head_dims in HEAD_DIMS:
        q, k, v = inputs(97, 403, head_dims, dtype, fp8, (6, 2))
        for arguments in (
            {"causal": True},
            {"window_left": 50},
            {"custom_mask": random_mask(97, 403)},
        ):
            out, lse = run(q, k, v, backend=backend, **arguments)
            other, other_lse = run(q, k.to(dtype), v.to(dtype), backend=backend, **arguments)
            assert torch.equal(out, other)
            assert torch.equal(lse, other_lse)


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value(backend: str, dtype: torch.dtype, fp8: torch.dtype) -> None:
    """The V of the only key are all 256 codes: they come out as they are."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(fp8)
    q = torch.zeros(1, 1, 64, dtype=dtype, device="cuda")
    out, _ = run(q, q.to(fp8), codes.view(1, 1, 256), backend=backend)
    exact = codes.to(dtype)
    assert torch.equal(out[0, 0].isfinite(), exact.isfinite())
    assert torch.equal(out[0, 0][exact.isfinite()], exact[exact.isfinite()])


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (12, 4), (40, 8)])
@pytest.mark.parametrize("layout", ["NHD", "HND", "fused", "poisoned", "one head for all"])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_heads_and_layouts(
    backend: str, fp8: torch.dtype, layout: str, heads: tuple[int, int]
) -> None:
    ledger = Ledger()
    for head_dim in (64, 72):
        dims = (head_dim, head_dim)
        q, k, v = inputs(77, 203, dims, torch.bfloat16, (fp8, fp8), heads)
        if layout == "one head for all":
            k, v = (x[:, :1].expand(203, heads[1], head_dim) for x in (k, v))
        expected = expect(q, k, v, causal=True)
        arguments: dict[str, Any] = {"causal": True, "backend": backend}
        if layout == "HND":
            k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
            arguments["kv_layout"] = "HND"
        elif layout == "fused":
            both = torch.empty(203, 2 * heads[1], head_dim, dtype=fp8, device="cuda")
            both[:, : heads[1]] = k
            both[:, heads[1] :] = v
            k, v = both[:, : heads[1]], both[:, heads[1] :]
        elif layout == "poisoned":
            k, v = poisoned(k), poisoned(v)
        buffer, out = guarded(77, heads[0], head_dim, dtype=q.dtype)
        _, lse = run(q, k, v, out=out, **arguments)
        ledger.result(f"{head_dim}", out, lse, expected)
        ledger.none("written outside", ~buffer[:16].isnan())
        ledger.none("written outside", ~buffer[93:].isnan())
    ledger.finish()


def test_what_cannot_be_addressed_is_copied(backend: str) -> None:
    q, k, v = inputs(30, 50)
    expected = run(q, k, v, backend=backend)
    apart = torch.empty(50, 2, 256, dtype=E4M3, device="cuda")[..., ::2]
    odd = torch.empty(50, 2, 132, dtype=E4M3, device="cuda")[..., :128]
    moved = torch.empty(50 * 2 * 128 + 8, dtype=E4M3, device="cuda")[8:].view(50, 2, 128)
    for view in (apart, odd, moved):
        view.copy_(k)
        told = explain(q, view, v, backend=backend)
        assert len(told.copies) == 1
        out, lse = run(q, view, v, backend=backend)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_everything_else(
    backend: str, dtype: torch.dtype, fp8: tuple[torch.dtype, torch.dtype]
) -> None:
    ledger = Ledger()
    sinks = torch.linspace(-1.0, 4.0, 4, device="cuda")
    scales: dict[str, Any] = {
        "scale_q": torch.linspace(0.5, -1.5, 4, device="cuda"),
        "scale_k": torch.linspace(0.5, 1.0, 2, device="cuda"),
        "scale_v": torch.linspace(0.5, 2.0, 2, device="cuda"),
    }
    rope: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA"}
    for qo_len, kv_len in ((1, 257), (131, 131), (70, 517), (333, 90)):
        for head_dims in ((64, 64), (72, 40), (128, 128)):
            q, k, v = inputs(qo_len, kv_len, head_dims, dtype, fp8)
            keep = random_mask(qo_len, kv_len)
            cases: list[dict[str, Any]] = [
                {"custom_mask": keep, **scales},
                {"logits_soft_cap": 3.0, "causal": True, "sinks": sinks, **scales},
                {"pos_encoding_mode": "ALIBI", "causal": True, "window_left": 100},
                {"lse_base": "e", "sm_scale": -0.2},
                rope,
                {**rope, "causal": True, "window_left": 45, **scales},
                {**rope, "custom_mask": keep, "sinks": sinks, "logits_soft_cap": 3.0},
                {**rope, "rope_scale": 8.0, "rope_theta": 5e5, "causal": True},
            ]
            for arguments in cases:
                label = f"{qo_len} x {kv_len} of {head_dims}, {list(arguments)}"
                compare(ledger, label, backend, q, k, v, **arguments)
    ledger.finish()


def test_rotated_fp8_keys_far_away(backend: str) -> None:
    length = 1_000_003
    q, k, v = inputs(40, length, (72, 64), heads=(2, 1))
    arguments: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA", "causal": True}
    arguments["window_left"] = 150
    out, lse = run(q, k, v, backend=backend, **arguments)
    ledger = Ledger()
    near = (q, k[-300:], v[-300:])
    ledger.result("far", out, lse, expect(*near, first_key=length - 300, **arguments))
    ledger.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_dequantise(backend: str, dtype: torch.dtype) -> None:
    """Floats, one element, one for each head: for fp8 what they are for 16 bits."""
    q, k, v = inputs(70, 200, dtype=dtype)
    tensor = torch.full((1,), 0.25, device="cuda")
    per_head = torch.full((2,), 0.25, device="cuda")
    results = [
        run(q, k, v, backend=backend, **arguments)
        for arguments in (
            {"scale_k": 0.25, "scale_v": 0.25},
            {"k_scale": 0.25, "v_scale": 0.25},
            {"scale_k": tensor, "scale_v": tensor},
            {"scale_k": per_head, "scale_v": per_head},
            {"k_scale": tensor, "v_scale": tensor},
        )
    ]
    ledger = Ledger()
    expected = expect(q, k, v, scale_k=0.25, scale_v=0.25)
    for i, (out, lse) in enumerate(results):
        ledger.result(f"{i}", out, lse, expected)
    ledger.finish()


@pytest.mark.parametrize("rope", [{}, {"pos_encoding_mode": "ROPE_LLAMA"}])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_nan_keys_that_are_masked_leave_no_trace(
    backend: str, fp8: torch.dtype, rope: dict[str, Any]
) -> None:
    q, k, v = inputs(150, 203, fp8=(fp8, fp8))
    keep = random_mask(150, 203)
    keep[:, 60:90] = False
    clean, clean_lse = run(q, k, v, custom_mask=keep, backend=backend, **rope)
    k.view(torch.uint8)[60:90] = 0x7F
    out, lse = run(q, k, v, custom_mask=keep, backend=backend, **rope)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    seen = torch.ones_like(keep)
    out, lse = run(q, k, v, custom_mask=seen, backend=backend, **rope)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_keys_before_the_window_are_not_read(backend: str) -> None:
    """NaN before the first tile of the window, in K and V."""
    q, k, v = inputs(40, 2000, (64, 64))
    clean, clean_lse = run(q, k, v, causal=True, window_left=100, backend=backend)
    k.view(torch.uint8)[:1500] = 0x7F
    v.view(torch.uint8)[:1500] = 0x7F
    out, lse = run(q, k, v, causal=True, window_left=100, backend=backend)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
