"""Head dims, groups, layouts and strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import Ledger, expect, guarded, normal, poisoned
from layouts import COPIED, IN_PLACE, relaid
from prefill import explain
from prefill import single_prefill_with_kv_cache_return_lse as run

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = [
    (8, 8),
    (16, 16),
    (24, 40),
    (32, 32),
    (56, 56),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (120, 8),
    (128, 64),
    (64, 128),
    (136, 128),
    (192, 128),
    (192, 8),
    (160, 160),
    (200, 176),
    (224, 224),
    (256, 8),
    (8, 256),
    (256, 256),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim_qk", "head_dim_vo"), HEAD_DIMS)
def test_head_dims(backend: str, dtype: torch.dtype, head_dim_qk: int, head_dim_vo: int) -> None:
    """Columns past the head dim are NaN: filling up to the class must not read them."""
    ledger = Ledger()
    for qo_len, kv_len, causal in (
        (1, 1, False),
        (65, 77, True),
        (130, 200, False),
        (3, 333, True),
    ):
        q = poisoned(normal(qo_len, 4, head_dim_qk, dtype=dtype))
        k = poisoned(normal(kv_len, 2, head_dim_qk, dtype=dtype, seed=1))
        v = poisoned(normal(kv_len, 2, head_dim_vo, dtype=dtype, seed=2))
        assert explain(q, k, v, backend=backend).copies == ()
        buffer = torch.full((qo_len, 4, head_dim_vo + 8), math.nan, dtype=dtype, device="cuda")
        out = buffer[..., :head_dim_vo]
        _, lse = run(q, k, v, causal=causal, backend=backend, out=out)
        label = f"{qo_len} x {kv_len}"
        ledger.result(label, out, lse, expect(q, k, v, causal=causal))
        ledger.none(f"{label}: written past the head dim", ~buffer[..., head_dim_vo:].isnan())
    ledger.finish()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_ratios(backend: str, dtype: torch.dtype, causal: bool) -> None:
    ledger = Ledger()
    for ratio in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        for kv_heads in (1, 2, 3):
            for qo_len, kv_len in ((1, 100), (127, 127), (130, 259)):
                q = normal(qo_len, ratio * kv_heads, 128, dtype=dtype)
                k, v = (normal(kv_len, kv_heads, 128, dtype=dtype, seed=s) for s in (1, 2))
                out, lse = run(q, k, v, causal=causal, backend=backend)
                label = f"{ratio} x {kv_heads} heads, {qo_len} x {kv_len}"
                ledger.result(label, out, lse, expect(q, k, v, causal=causal))
    ledger.finish()


def test_group_of_7_at_the_diagonal(backend: str) -> None:
    """28 heads over 4: rare errors at the diagonal have been seen elsewhere."""
    ledger = Ledger()
    for length in range(100, 164):
        q = normal(length, 28, 128, dtype=torch.float16)
        k, v = (normal(length, 4, 128, dtype=torch.float16, seed=s) for s in (1, 2))
        out, lse = run(q, k, v, causal=True, backend=backend)
        ledger.result(f"{length}", out, lse, expect(q, k, v, causal=True))
    ledger.finish()


@pytest.mark.parametrize("kv_heads", range(1, 9))
def test_kv_head_counts(backend: str, kv_heads: int) -> None:
    ledger = Ledger()
    for ratio in (1, 3):
        q = normal(129, ratio * kv_heads, 64, dtype=torch.bfloat16)
        k, v = (normal(300, kv_heads, 64, dtype=torch.bfloat16, seed=s) for s in (1, 2))
        for causal in (False, True):
            out, lse = run(q, k, v, causal=causal, backend=backend)
            ledger.result(f"{ratio}, {causal}", out, lse, expect(q, k, v, causal=causal))
    ledger.finish()


@pytest.mark.parametrize("heads", [(64, 1), (64, 64), (128, 8)])
def test_many_heads(backend: str, heads: tuple[int, int]) -> None:
    q = normal(140, heads[0], 64, dtype=torch.float16)
    k, v = (normal(150, heads[1], 64, dtype=torch.float16, seed=s) for s in (1, 2))
    out, lse = run(q, k, v, causal=True, backend=backend)
    ledger = Ledger()
    ledger.result(f"{heads}", out, lse, expect(q, k, v, causal=True))
    ledger.finish()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (80, 72)])
@pytest.mark.parametrize("layout", IN_PLACE + COPIED)
def test_layouts_are_bit_equal_to_contiguous(
    backend: str, layout: str, head_dims: tuple[int, int], causal: bool
) -> None:
    for qo_len, kv_len in ((1, 1), (1, 90), (130, 1), (131, 261)):
        q = normal(qo_len, 6, head_dims[0], dtype=torch.bfloat16)
        k = normal(kv_len, 3, head_dims[0], dtype=torch.bfloat16, seed=1)
        v = normal(kv_len, 3, head_dims[1], dtype=torch.bfloat16, seed=2)
        arguments: dict[str, Any] = {"causal": causal, "backend": backend}
        out, lse = run(q, k, v, **arguments)
        assert not out.isnan().any()
        for which in ("q", "k", "v", "qkv"):
            tensors = [
                relaid(tensor, layout) if name in which else tensor
                for name, tensor in (("q", q), ("k", k), ("v", v))
            ]
            told = explain(*tensors, **arguments)
            if layout in IN_PLACE:
                assert told.copies == ()
            elif kv_len > 1 and qo_len > 1:
                assert len(told.copies) == len(which)
            other, other_lse = run(*tensors, **arguments)
            assert torch.equal(out, other), which
            assert torch.equal(lse, other_lse), which
        given = relaid(torch.zeros_like(out), layout)
        given_lse = torch.empty(6, qo_len, device="cuda").t()
        run(q, k, v, **arguments, out=given, lse=given_lse)
        assert torch.equal(out, given)
        assert torch.equal(lse, given_lse)


def test_hnd_equals_nhd(backend: str) -> None:
    for kv_len in (1, 5, 200):
        q = normal(100, 4, 128, dtype=torch.float16)
        k, v = (normal(kv_len, 2, 128, dtype=torch.float16, seed=s) for s in (1, 2))
        out, lse = run(q, k, v, causal=True, backend=backend)
        hnd = [x.transpose(0, 1).contiguous() for x in (k, v)]
        other, other_lse = run(q, *hnd, causal=True, backend=backend, kv_layout="HND")
        assert torch.equal(out, other)
        assert torch.equal(lse, other_lse)


def test_strides_of_size_1_dims(backend: str) -> None:
    """Torch gives a dim of size 1 any stride; here 1, 3, 0 and a huge one."""
    flat = normal(4096, dtype=torch.bfloat16)
    q, k = flat[:512].view(1, 4, 128), flat[512:640].view(1, 1, 128)
    out, lse = run(q, k, k, backend=backend)
    for stride in (0, 1, 3, 2**40 + 1):
        odd_q = torch.as_strided(flat, (1, 4, 128), (stride, 128, 1))
        odd_k = torch.as_strided(flat, (1, 1, 128), (stride, stride, 1), 512)
        assert explain(odd_q, odd_k, odd_k, backend=backend).copies == ()
        other, other_lse = run(odd_q, odd_k, odd_k, backend=backend)
        assert torch.equal(out, other), stride
        assert torch.equal(lse, other_lse), stride
        result = torch.empty(512, dtype=torch.bfloat16, device="cuda")
        strided = torch.as_strided(result, (1, 4, 128), (stride, 128, 1))
        run(odd_q, odd_k, odd_k, backend=backend, out=strided)
        assert torch.equal(out, strided), stride


def test_one_head_seen_by_all(backend: str) -> None:
    """Stride 0: one key head expanded to eight, one row expanded to many."""
    q = normal(70, 8, 64, dtype=torch.float16)
    k, v = (normal(200, 1, 64, dtype=torch.float16, seed=s) for s in (1, 2))
    out, lse = run(q, k, v, causal=True, backend=backend)
    expanded = [x.expand(200, 8, 64) for x in (k, v)]
    other, other_lse = run(q, *expanded, causal=True, backend=backend)
    ledger = Ledger()
    expected = expect(q, k, v, causal=True)
    ledger.result("one head", out, lse, expected)
    ledger.result("expanded", other, other_lse, expected)
    rows = q[:1].expand(70, 8, 64)
    ledger.result("one row", *run(rows, k, v, backend=backend), expect(rows, k, v))
    ledger.finish()


def wide(shape: tuple[int, ...], strides: tuple[int, ...], buffer: Tensor, offset: int) -> Tensor:
    view = torch.as_strided(buffer, shape, strides, offset)
    return view.copy_(normal(*shape, dtype=buffer.dtype, seed=offset % 97))


@pytest.mark.parametrize("which", ["tokens", "heads"])
def test_offsets_past_2_to_the_31(backend: str, which: str) -> None:
    elements = (1 << 32) + (1 << 20)
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * elements + (4 << 30):
        pytest.skip(f"needs {2 * elements >> 30} GiB of device memory")
    buffer = torch.empty(elements, dtype=torch.float16, device="cuda")
    step = (1 << 32) // (300 if which == "tokens" else 2) // 8 * 8
    strides = (step, 128, 1) if which == "tokens" else (128, step, 1)
    rows = 300
    apart = 1 << 17
    q = wide((rows, 2, 128), strides, buffer, 0)
    k = wide((rows, 2, 128), strides, buffer, apart)
    v = wide((rows, 2, 128), strides, buffer, 2 * apart)
    out = torch.as_strided(buffer, (rows, 2, 128), strides, 3 * apart)
    assert (rows - 1) * strides[0] + strides[1] >= 1 << 31
    assert explain(q, k, v, backend=backend, out=out).copies == ()
    _, lse = run(q, k, v, causal=True, backend=backend, out=out)
    near, near_lse = run(*(x.contiguous() for x in (q, k, v)), causal=True, backend=backend)
    assert torch.equal(out, near)
    assert torch.equal(lse, near_lse)
    ledger = Ledger()
    ledger.result("far apart", out, lse, expect(q, k, v, causal=True))
    ledger.finish()


def test_given_results_are_written_and_nothing_else(backend: str) -> None:
    q = normal(131, 6, 72, dtype=torch.float16)
    k = normal(200, 3, 72, dtype=torch.float16, seed=1)
    v = normal(200, 3, 40, dtype=torch.float16, seed=2)
    out, lse = run(q, k, v, causal=True, backend=backend)
    buffer, given = guarded(131, 6, 40, dtype=torch.float16)
    lse_buffer, given_lse = guarded(131, 6, dtype=torch.float32)
    result, result_lse = run(q, k, v, causal=True, backend=backend, out=given, lse=given_lse)
    assert result is given
    assert result_lse is given_lse
    assert torch.equal(out, given)
    assert torch.equal(lse, given_lse)
    assert buffer.isnan().sum() == 32 * 6 * 40
    assert lse_buffer.isnan().sum() == 32 * 6
