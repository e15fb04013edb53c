"""Every length from 1 to 300 keys, against few, tile-sized and many rows, amid NaN."""

from __future__ import annotations

import math

import pytest
import torch

from exactness import Ledger, expect, normal
from prefill import single_prefill_with_kv_cache

LAST = 300
MODES: dict[str, dict[str, int | bool]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 70},
    "window without causal": {"window_left": 33},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "head_dim_qk", "head_dim_vo"),
    [
        (torch.float16, 64, 64),
        (torch.float16, 128, 128),
        (torch.bfloat16, 128, 128),
        (torch.bfloat16, 192, 128),
        (torch.float16, 256, 256),
    ],
)
def test_every_length(
    backend: str, dtype: torch.dtype, head_dim_qk: int, head_dim_vo: int, mode: str
) -> None:
    """Rows align at the end, so the result of fewer rows is the tail of that of more."""
    heads, kv_heads, most = 4, 2, max(LAST + 33, 129)
    rows = normal(most, heads, head_dim_qk, dtype=dtype, seed=1)
    keys = normal(LAST, kv_heads, head_dim_qk, dtype=dtype, seed=2)
    values = normal(LAST, kv_heads, head_dim_vo, dtype=dtype, seed=3)
    q_buffer = torch.full((most + 160, heads, head_dim_qk), math.nan, dtype=dtype, device="cuda")
    k_cache = torch.full((LAST + 160, kv_heads, head_dim_qk), math.nan, dtype=dtype, device="cuda")
    v_cache = torch.full((LAST + 160, kv_heads, head_dim_vo), math.nan, dtype=dtype, device="cuda")
    q_buffer[:most] = rows
    out_buffer = torch.empty(most + 32, heads, head_dim_vo, dtype=dtype, device="cuda")
    lse_buffer = torch.empty(most + 32, heads, device="cuda")
    arguments = MODES[mode]
    ledger = Ledger()
    for kv_len in range(1, LAST + 1):
        k_cache[kv_len - 1], v_cache[kv_len - 1] = keys[kv_len - 1], values[kv_len - 1]
        lengths = sorted({1, 2, 63, 64, 65, 127, 128, 129, kv_len, kv_len + 33})
        full = expect(
            rows[most - lengths[-1] :],
            keys[:kv_len],
            values[:kv_len],
            **arguments,  # type: ignore[arg-type]
        )
        for qo_len in lengths:
            out_buffer.fill_(math.nan)
            lse_buffer.fill_(math.nan)
            out, lse = out_buffer[16 : 16 + qo_len], lse_buffer[16 : 16 + qo_len]
            single_prefill_with_kv_cache(
                q_buffer[most - qo_len : most],
                k_cache[:kv_len],
                v_cache[:kv_len],
                backend=backend,
                return_lse=True,
                out=out,
                lse=lse,
                **arguments,  # type: ignore[call-overload]
            )
            label = f"qo_len {qo_len}, kv_len {kv_len}"
            ledger.result(label, out, lse, full.last_rows(qo_len))
            for buffer, name in ((out_buffer, "out"), (lse_buffer, "lse")):
                for outside in (buffer[:16], buffer[16 + qo_len :]):
                    ledger.none(f"{label}: written outside {name}", ~outside.isnan())
    ledger.finish()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("base", [96, 128, 176, 192, 256])
def test_around_multiples_of_tiles(backend: str, base: int, causal: bool) -> None:
    dtype = torch.bfloat16
    ledger = Ledger()
    q = normal(200, 4, 128, dtype=dtype)
    k = normal(12 * base + 1, 2, 128, dtype=dtype, seed=1)
    v = normal(12 * base + 1, 2, 128, dtype=dtype, seed=2)
    for multiple in (3, 5, 8, 12):
        for kv_len in (multiple * base - 1, multiple * base, multiple * base + 1):
            expected = expect(q, k[:kv_len], v[:kv_len], causal=causal)
            out, lse = single_prefill_with_kv_cache(
                q, k[:kv_len], v[:kv_len], causal=causal, backend=backend, return_lse=True
            )
            ledger.result(f"kv_len {kv_len}", out, lse, expected)
    ledger.finish()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long(backend: str, dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    ledger = Ledger()
    for qo_len, kv_len in ((1024, 1024), (777, 2049), (16, 8191), (2048, 100)):
        q = normal(qo_len, 6, head_dim, dtype=dtype)
        k, v = (normal(kv_len, 2, head_dim, dtype=dtype, seed=s) for s in (1, 2))
        out, lse = single_prefill_with_kv_cache(
            q, k, v, causal=causal, backend=backend, return_lse=True
        )
        ledger.result(f"{qo_len} x {kv_len}", out, lse, expect(q, k, v, causal=causal))
    ledger.finish()


def test_one_kv_head_larger_than_the_cache_budget(backend: str) -> None:
    """A causal schedule that groups heads by L2 size must cope with one head that exceeds it."""
    kv_len = 65537
    q = normal(130, 4, 128, dtype=torch.bfloat16)
    k, v = (normal(kv_len, 1, 128, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=True, backend=backend, return_lse=True)
    ledger = Ledger()
    ledger.result("65537 keys", out, lse, expect(q, k, v, causal=True))
    ledger.finish()


def test_many_rows_and_keys(backend: str) -> None:
    """65 thousand rows: rows from everywhere against the truth."""
    length, dtype = 65537, torch.bfloat16
    q = normal(length, 1, 64, dtype=dtype)
    k, v = (normal(length, 1, 64, dtype=dtype, seed=s) for s in (1, 2))
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=True, backend=backend, return_lse=True)
    ledger = Ledger()
    for last in (1, 128, 129, 5000, 32768, 65536, length):
        first = max(0, last - 100)
        expected = expect(q[first:last], k[:last], v[:last], causal=True)
        ledger.result(f"rows {first}..{last}", out[first:last], lse[first:last], expected)
    ledger.finish()


@pytest.mark.parametrize(
    ("qo_len", "heads", "kv_len"), [(0, 4, 7), (5, 0, 7), (5, 4, 0), (0, 4, 0)]
)
def test_empty(backend: str, qo_len: int, heads: int, kv_len: int) -> None:
    q = normal(qo_len, heads, 64, dtype=torch.float16)
    k = normal(kv_len, 2, 64, dtype=torch.float16)
    out, lse = single_prefill_with_kv_cache(q, k, k, causal=True, backend=backend, return_lse=True)
    assert out.shape == (qo_len, heads, 64)
    assert lse.shape == (qo_len, heads)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    torch.cuda.synchronize()
