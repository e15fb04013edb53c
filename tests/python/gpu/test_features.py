"""Custom masks, soft caps, ALiBi and sinks, each alone; `test_combinations` has them together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import per_head, random_mask
from exactness import LOG2_E, Ledger, expect, guarded, inputs, normal, visible
from prefill import explain, packbits
from prefill import single_prefill_with_kv_cache_return_lse as run

DTYPES = (torch.float16, torch.bfloat16)
# Head dims of each class: whole, and below the class.
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (40, 56), (96, 72), (136, 8), (200, 216)]
LENGTHS = ((1, 1), (1, 333), (65, 77), (130, 261), (300, 90), (129, 1003), (513, 520))


def compare(ledger: Ledger, label: str, backend: str, *tensors: Tensor, **arguments: Any) -> None:
    assert explain(*tensors, backend=backend, **arguments).backend == backend
    out, lse = run(*tensors, backend=backend, **arguments)
    ledger.result(label, out, lse, expect(*tensors, **arguments))


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_custom_masks(backend: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    ledger = Ledger()
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype)
        keep = random_mask(qo_len, kv_len)
        bits = packbits(keep, bitorder="little")
        for window in (-1, 0, 70):
            out, lse = run(q, k, v, custom_mask=keep, window_left=window, backend=backend)
            expected = expect(q, k, v, custom_mask=keep, window_left=window)
            ledger.result(f"{qo_len} x {kv_len}, window {window}", out, lse, expected)
            same, same_lse = run(
                q, k, v, packed_custom_mask=bits, window_left=window, backend=backend
            )
            assert torch.equal(out, same)
            assert torch.equal(lse, same_lse)
    ledger.finish()


def test_mask_of_any_layout(backend: str) -> None:
    """Transposed, sliced, expanded; packed at odd addresses, with set bits past the end."""
    q, k, v = inputs(67, 131)
    keep = random_mask(67, 131)
    expected = run(q, k, v, custom_mask=keep, backend=backend)
    wide = torch.zeros(67, 200, dtype=torch.bool, device="cuda")
    wide[:, 5:136] = keep
    bits = packbits(keep, bitorder="little")
    size = bits.numel()
    assert 67 * 131 % 8 == 1
    bits[-1] |= 0xFE
    apart = torch.zeros(2 * size, dtype=torch.uint8, device="cuda")[::2].copy_(bits)
    odd = torch.full((size + 3,), 0xFF, dtype=torch.uint8, device="cuda")[3:].copy_(bits)
    masks: list[dict[str, Any]] = [
        {"custom_mask": keep.t().contiguous().t()},
        {"custom_mask": wide[:, 5:136]},
        {"packed_custom_mask": bits},
        {"packed_custom_mask": apart},
        {"packed_custom_mask": odd},
        {"packed_custom_mask": bits, "custom_mask": ~keep},
    ]
    for mask in masks:
        for result, exact in zip(run(q, k, v, backend=backend, **mask), expected, strict=True):
            assert torch.equal(result, exact)
    row = keep[:1].expand(67, 131)
    ledger = Ledger()
    compare(ledger, "one row for all", backend, q, k, v, custom_mask=row)
    ledger.finish()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_that_say_what_a_band_says(backend: str, dtype: torch.dtype) -> None:
    ledger = Ledger()
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, dtype=dtype)
        for bounds in ({}, {"causal": True}, {"causal": True, "window_left": 33}):
            causal, window = bool(bounds.get("causal")), int(bounds.get("window_left", -1))
            keep = visible(qo_len, kv_len, causal, window, "cuda")
            out, lse = run(q, k, v, custom_mask=keep, backend=backend)
            ledger.result(f"{qo_len} x {kv_len}, {bounds}", out, lse, expect(q, k, v, **bounds))
    ledger.finish()


@pytest.mark.filterwarnings("ignore:causal=True has no effect")
def test_causal_has_no_effect_on_a_mask(backend: str) -> None:
    q, k, v = inputs(100, 130)
    keep = random_mask(100, 130)
    out, lse = run(q, k, v, custom_mask=keep, backend=backend)
    other, other_lse = run(q, k, v, custom_mask=keep, causal=True, backend=backend)
    assert torch.equal(out, other)
    assert torch.equal(lse, other_lse)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rows_without_keys(backend: str, head_dim: int, sinks: bool) -> None:
    """All of them, all but one, and whole tiles of rows; results lie amid NaN."""
    q, k, v = inputs(500, 203, (head_dim, min(head_dim, 128)))
    values = per_head(4, -2.0, 3.0)
    arguments: dict[str, Any] = {"sinks": values} if sinks else {}
    empty_lse = values * LOG2_E if sinks else torch.full_like(values, -math.inf)
    for seeing in ([], [499], [0, 256, 257]):
        keep = torch.zeros(500, 203, dtype=torch.bool, device="cuda")
        keep[seeing, 101] = True
        buffer, out = guarded(500, 4, v.shape[2], dtype=q.dtype)
        lse_buffer, lse = guarded(500, 4, dtype=torch.float32)
        run(q, k, v, custom_mask=keep, backend=backend, out=out, lse=lse, **arguments)
        others = [row for row in range(500) if row not in seeing]
        assert (out[others] == 0).all()
        torch.testing.assert_close(
            lse[others], empty_lse.expand(len(others), 4), rtol=2.0**-22, atol=0
        )
        if not sinks:
            only = v[101].repeat_interleave(2, 0)
            assert all(torch.equal(out[row], only) for row in seeing)
        assert lse[seeing].isfinite().all()
        assert buffer.isnan().sum() == 32 * 4 * v.shape[2]
        assert lse_buffer.isnan().sum() == 32 * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"logits_soft_cap": 5.0},
        {"pos_encoding_mode": "ALIBI"},
        {"logits_soft_cap": 5.0, "pos_encoding_mode": "ALIBI", "sm_scale": -0.1},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_bad_keys_that_are_masked_leave_no_trace(
    backend: str, head_dim: int, extra: dict[str, Any], bad: float
) -> None:
    q, k, v = inputs(150, 203, (head_dim, 64))
    keep = random_mask(150, 203)
    for hidden in (slice(60, 61), slice(60, 90), slice(0, 150)):
        masked = keep.clone()
        masked[:, hidden] = False
        clean, clean_lse = run(q, k, v, custom_mask=masked, backend=backend, **extra)
        assert clean.isfinite().all()
        keys = k.clone()
        keys[hidden] = bad
        out, lse = run(q, keys, v, custom_mask=masked, backend=backend, **extra)
        assert torch.equal(out, clean)
        assert torch.equal(lse, clean_lse)
    clean, clean_lse = run(q, k, v, causal=True, backend=backend, **extra)
    future = k.clone()
    future[120:] = bad  # position 120 is that of row 67
    out, lse = run(q, future, v, causal=True, backend=backend, **extra)
    assert torch.equal(out[:67], clean[:67])
    assert torch.equal(lse[:67], clean_lse[:67])


@pytest.mark.parametrize("extra", [{}, {"logits_soft_cap": 5.0}, {"pos_encoding_mode": "ALIBI"}])
def test_nan_reaches_the_rows_that_see_it(backend: str, extra: dict[str, Any]) -> None:
    q, k, v = inputs(100, 100)
    k[60] = math.nan
    keep = random_mask(100, 100)
    out, lse = run(q, k, v, custom_mask=keep, backend=backend, **extra)
    assert keep[:, 60].any()
    assert out[keep[:, 60]].isnan().all()
    assert lse[keep[:, 60]].isnan().all()
    assert out[~keep[:, 60]].isfinite().all()


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(backend: str, dtype: torch.dtype, head_dims: tuple[int, int], cap: float) -> None:
    ledger = Ledger()
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype)
        for more in ({}, {"causal": True}, {"sm_scale": -1.0}, {"sm_scale": 4.0, "causal": True}):
            label = f"{qo_len} x {kv_len}, {more}"
            compare(ledger, label, backend, q, k, v, logits_soft_cap=cap, **more)
    ledger.finish()


def test_soft_cap_holds_infinite_logits(backend: str) -> None:
    """Keys at +-inf count as the cap and minus the cap, one at NaN as NaN."""
    q = torch.ones(3, 1, 64, dtype=torch.float16, device="cuda")
    k = torch.zeros(3, 1, 64, dtype=torch.float16, device="cuda")
    k[0, 0, 0], k[1, 0, 0], k[2, 0, 0] = math.inf, -math.inf, math.nan
    v = torch.eye(3, 64, dtype=torch.float16, device="cuda")[:, None]
    keep = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]], device="cuda") > 0
    out, lse = run(q, k, v, custom_mask=keep, logits_soft_cap=2.0, backend=backend)
    logits = torch.tensor([2.0, -2.0], dtype=torch.float64)
    weights = torch.softmax(logits, 0)
    unit = torch.finfo(torch.float16).eps
    torch.testing.assert_close(out[0, 0, :2].cpu().double(), weights, rtol=unit, atol=0)
    torch.testing.assert_close(
        lse[:2, 0].cpu().double(),
        torch.stack((logits.logsumexp(0), logits[0])) * LOG2_E,
        rtol=2.0**-19,
        atol=0,
    )
    assert out[1, 0, 0] == 1.0
    assert out[2].isnan().all()
    assert lse[2].isnan().all()


@pytest.mark.parametrize(
    ("head_dims", "heads"),
    [(head_dims, (4, 2)) for head_dims in HEAD_DIMS]
    + [((64, 64), heads) for heads in ((1, 1), (7, 7), (12, 4), (40, 8))],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi(
    backend: str, dtype: torch.dtype, head_dims: tuple[int, int], heads: tuple[int, int]
) -> None:
    ledger = Ledger()
    given = per_head(heads[0], -0.05, 0.4)
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype, heads)
        for slopes in (None, given, given[:1].expand(heads[0])):
            for causal in (False, True):
                compare(
                    ledger,
                    f"{qo_len} x {kv_len}, causal {causal}, given {slopes is not None}",
                    backend,
                    *(q, k, v),
                    causal=causal,
                    pos_encoding_mode="ALIBI",
                    alibi_slopes=slopes,
                )
    ledger.finish()


def test_alibi_of_far_keys(backend: str) -> None:
    """Distances of 100,000: the bias alone decides, and the LSE holds it."""
    kv_len = 100_003
    q = torch.zeros(5, 2, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(kv_len, 2, 64, dtype=torch.bfloat16, device="cuda")
    v = normal(kv_len, 2, 64, dtype=torch.bfloat16)
    slopes = torch.tensor([-0.5, 0.25], device="cuda")
    out, lse = run(
        q, k, v, pos_encoding_mode="ALIBI", alibi_slopes=slopes, causal=True, backend=backend
    )
    expected = expect(q, k, v, pos_encoding_mode="ALIBI", alibi_slopes=slopes, causal=True)
    assert expected.lse[0, 0] > 7e4
    torch.testing.assert_close(lse.double(), expected.lse, rtol=2.0**-21, atol=2.0**-18)
    # Logits of 5e4 are 2^-8 apart in float32: so far may weights be off.
    torch.testing.assert_close(out.double(), expected.out, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(backend: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    ledger = Ledger()
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype)
        for low, high in ((-5.0, 5.0), (-100.0, 100.0), (0.0, 0.0)):
            sinks = per_head(4, low, high)
            for more in ({}, {"causal": True}, {"causal": True, "window_left": 20}):
                label = f"{qo_len} x {kv_len}, {low}..{high}, {more}"
                compare(ledger, label, backend, q, k, v, sinks=sinks, **more)
    ledger.finish()


def test_sinks_at_the_ends(backend: str) -> None:
    """-inf is no sink, bit for bit; +inf takes all."""
    q, k, v = inputs(300, 200)
    plain, plain_lse = run(q, k, v, causal=True, backend=backend)
    sinks = torch.tensor([-math.inf, -math.inf, math.inf, 0.0], device="cuda")
    out, lse = run(q, k, v, causal=True, sinks=sinks, backend=backend)
    assert torch.equal(out[:, :2], plain[:, :2])
    assert torch.equal(lse[:, :2], plain_lse[:, :2])
    assert (out[:, 2] == 0).all()
    assert (lse[:, 2] == math.inf).all()
    assert (lse[100:, 3] > plain_lse[100:, 3]).all()
    assert (lse[:100, 3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_beside_steep_and_anchored_rows(backend: str, dtype: torch.dtype) -> None:
    """Rows whose maximum comes late, by so much that weights relative to an early one overflow."""
    ledger = Ledger()
    for size in (3.0, 40.0, 200.0, 5000.0):
        q, k, v = inputs(200, 2000, dtype=dtype)
        q[..., 0] = 1.0
        k[..., 0] = 0.0
        k[1500, :, 0] = size
        for shift in (-20.0, 0.0, 20.0):
            sinks = torch.full((4,), size + shift, device="cuda")
            label = f"{size}, {shift}"
            compare(ledger, label, backend, q, k, v, sinks=sinks, sm_scale=1.0)
            compare(ledger, f"{label}, causal", backend, q, k, v, sinks=sinks, causal=True)
    ledger.finish()


def test_masks_past_2_to_the_31_bits(backend: str) -> None:
    """46,600 rows of 46,600 keys: the last rows' bits lie beyond 2^31."""
    length = 46_600
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of device memory")
    assert (length - 200) * length > 1 << 31
    q, k, v = inputs(length, length, (64, 64), heads=(1, 1))
    keep = torch.zeros(length, length, dtype=torch.bool, device="cuda")
    for row in (0, 1, 23_000, length - 150, length - 1):
        keep[row, torch.randint(length, (500,), device="cuda")] = True
    seeing = keep.any(1)
    out, lse = run(q, k, v, custom_mask=keep, backend=backend)
    assert (out[~seeing] == 0).all()
    assert (lse[~seeing] == -math.inf).all()
    ledger = Ledger()
    rows = [q[seeing], k, v]
    ledger.result("far", out[seeing], lse[seeing], expect(*rows, custom_mask=keep[seeing]))
    ledger.finish()
