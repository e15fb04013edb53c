"""fa3's kernels that multiply in float8. `test_fp8` has features, dtypes and layouts for all.

They are held against the errors of FlashAttention-3's scheme (`float8_scheme`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import exactness
import float8_inputs
from cases import BFLOAT16, E4M3, E5M2
from exactness import Ledger, expect, normal, same
from float8_inputs import Inputs, drawn, errors, real
from float8_products import float8_product
from float8_scheme import is_native
from fuzz_cases import fuzzed
from fuzz_check import outcome
from layouts import amid_nan
from prefill import explain, support
from prefill import single_prefill_with_kv_cache_return_lse as run
from prefill.explain import Explanation
from split_cases import split_attention

FP8 = (E4M3, E5M2)
CLASSES = ((64, 64), (128, 128), (192, 128), (256, 256))
RMS, MAX = 1.02, 2.0
"""Largest errors over those of the scheme."""


@pytest.fixture(autouse=True)
def _native(backend: str) -> None:
    build = support.native().build
    assert build is not None
    if backend != "fa3":
        pytest.skip("fa2 has no float8 products")
    if not any(kernel.dtype.startswith("float8") for kernel in build.kernels_of("fa3")):
        pytest.skip("this build has no float8 kernels")


def native_classes(dtype: torch.dtype) -> list[tuple[int, int]]:
    name, build = support.dtype_name(dtype), support.native().build
    assert build is not None
    return [
        dims
        for dims in CLASSES
        if any(
            (kernel.dtype, kernel.head_dim_qk, kernel.head_dim_vo) == (name, *dims)
            for kernel in build.kernels_of("fa3")
        )
    ]


def tensors_of(
    qo_len: int,
    kv_len: int,
    head_dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = E4M3,
    heads: tuple[int, int] = (4, 2),
) -> tuple[Tensor, Tensor, Tensor]:
    return exactness.inputs(qo_len, kv_len, head_dims, dtype, heads)


def told_of(tensors: tuple[Tensor, ...], **arguments: Any) -> Explanation:
    q, k, v = tensors
    return explain(q, k, v, backend="fa3", **arguments)


KINDS: dict[str, Any] = {
    "normal": drawn,
    "outliers": partial(drawn, outliers=float8_inputs.OUTLIERS),
}


def hold(label: str, inputs: Inputs, product: Any) -> list[str]:
    """What is wrong with the errors of the calls on these inputs, in every output dtype."""
    tile = told_of(inputs.tensors).tile
    assert tile is not None

    def attend(*tensors: Tensor, **arguments: Any) -> Tensor:
        return run(*tensors, backend="fa3", **arguments)[0]

    wrong = []
    for causal in (False, True):
        for o_dtype in (BFLOAT16, torch.float32):
            ours, scheme = errors(inputs, attend, causal, o_dtype, tile[1], product)
            rms, largest = ours.rms / scheme.rms, ours.largest / scheme.largest
            if not (rms <= RMS and largest <= MAX):
                wrong.append(f"{label}, causal {causal}, {o_dtype}: {rms:.3f}, {largest:.3f}")
    return wrong


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_beside_those_of_the_scheme(dtype: torch.dtype, kind: str) -> None:
    """RMS and the largest. Beside outliers sums that are cut show: the scheme's are cut alike."""
    wrong = []
    for head_dims in native_classes(dtype):
        for lengths in ((300, 300), (200, 2000), (1000, 4096)):
            inputs = KINDS[kind](lengths, head_dims, dtype, "cuda")
            assert is_native(told_of(inputs.tensors))
            product = float8_product if kind == "outliers" else torch.matmul
            wrong += hold(f"{head_dims}, {lengths}", inputs, product)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", FP8)
def test_errors_on_real_inputs(dtype: torch.dtype) -> None:
    inputs = real(dtype, "cuda")
    assert is_native(told_of(inputs.tensors))
    wrong = hold("real", inputs, float8_product)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_flat_scores_over_many_keys(dtype: torch.dtype, num_splits: int) -> None:
    """Sums of all keys at once would be off by half: a tile's alone are, by less than 2^-8."""
    for head_dims in native_classes(dtype):
        q, k, v = tensors_of(130, 32768, head_dims, dtype)
        q.zero_()
        v = (v.float() + 3.0).to(dtype)
        mean = v.double().mean(0).repeat_interleave(2, 0)
        arguments = {"o_dtype": torch.float32, "backend": "fa3", "num_splits": num_splits}
        out, lse = split_attention(q, k, v, return_lse=True, **arguments)
        assert ((out.double() - mean) / mean).abs().amax() <= 2.0**-8
        assert (lse - 15.0).abs().amax() < 1e-4


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("window_left", [-1, 0, 100])
def test_every_length_to_600(dtype: torch.dtype, window_left: int) -> None:
    """Amid NaN, which the pass that transposes v must not let in."""
    most = 600
    for head_dims in native_classes(dtype)[:2]:
        rows, keys, values = tensors_of(most, most, head_dims, dtype)
        assert is_native(told_of((rows, keys, values)))
        k_cache, v_cache = (
            torch.full((most + 160, *x.shape[1:]), math.nan, device="cuda").to(dtype)
            for x in (keys, values)
        )
        ledger = Ledger()
        for kv_len in range(1, most + 1):
            k_cache[kv_len - 1], v_cache[kv_len - 1] = keys[kv_len - 1], values[kv_len - 1]
            bounds = {"causal": True, "window_left": window_left}
            lengths = (1, 257) if kv_len % 64 in (0, 1, 63) else (1 + kv_len % 131,)
            cut = rows[most - max(lengths) :], keys[:kv_len], values[:kv_len]
            whole = expect(*cut, **bounds, native=True)
            for qo_len in lengths:
                shape = (qo_len, rows.shape[1], values.shape[2])
                given = amid_nan(shape, (8, 0, 0), (8, 0, 0), BFLOAT16, "cuda")
                q = rows[most - qo_len :]
                arguments = {**bounds, "backend": "fa3", "out": given.view}
                out, lse = run(q, k_cache[:kv_len], v_cache[:kv_len], **arguments)
                label = f"{head_dims}, {qo_len} x {kv_len}"
                ledger.result(label, out, lse, whole.last_rows(qo_len))
                ledger.none(f"{label}: written beside out", given.written_outside())
        ledger.finish()


@pytest.mark.parametrize("dtype", FP8)
def test_windows_leave_keys_before_them_out(dtype: torch.dtype) -> None:
    """Neither pass nor kernel reads what no row sees: it may be anything."""
    for kv_len in (700, 1025, 4097):
        for window_left in (0, 63, 64, 200):
            q, k, v = tensors_of(130, kv_len, (128, 128), dtype)
            bounds = {"causal": True, "window_left": window_left, "backend": "fa3"}
            right = run(q, k, v, **bounds)
            for x in (k, v):
                x[: kv_len - 130 - window_left - 256] = math.nan
            assert same(run(q, k, v, **bounds), right)


STRAYS = [(x, value) for x in "qkv" for value in ("nan", "inf", "-inf")]


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("stray", STRAYS, ids="-".join)
def test_what_is_not_finite(dtype: torch.dtype, stray: tuple[str, str]) -> None:
    """It stays with the rows that see it, and with its channel where it is in v."""
    for where in (0.0, 0.3, 0.77, 0.999):
        for mask in ("none", "causal", "bool"):
            for head_dims in native_classes(dtype):
                case = fuzzed(
                    dtypes=(dtype,) * 3,
                    backend="fa3",
                    head_dims=head_dims,
                    qo_len=140,
                    kv_len=300,
                    group=2,
                    mask=mask,
                    lse="new",
                    stray=(*stray, where),
                )
                found = outcome(case, "cuda")
                assert found.kind == "passed", f"{case}: {found.text}"


@pytest.mark.parametrize(("dtype", "bad"), [(E5M2, math.inf), (E5M2, math.nan), (E4M3, math.nan)])
def test_a_bad_number_in_a_key_moves_no_bit_of_rows_that_do_not_see_it(
    dtype: torch.dtype, bad: float
) -> None:
    """One number: scores with it are infinite in all rows beside, and their softmax is steep."""
    for head_dims in native_classes(dtype):
        q, k, v = (x.float() for x in tensors_of(100, 130, head_dims, dtype))
        q[..., 0] = 1.0
        clean = run(q.to(dtype), k.to(dtype), v.to(dtype), causal=True, backend="fa3")
        k[80, :, 0] = bad  # position 80 is that of row 50
        out, lse = run(q.to(dtype), k.to(dtype), v.to(dtype), causal=True, backend="fa3")
        assert same((out[:50], lse[:50]), (clean[0][:50], clean[1][:50]))
        assert out[50:].isnan().all()


@pytest.mark.parametrize("dtype", FP8)
def test_custom_masks_take_keys_in_the_order_of_causal_ones(dtype: torch.dtype) -> None:
    """What the first key, with most of a row's weight, came before would be rounded to nothing."""
    for head_dims in native_classes(dtype):
        q, k, v = (x.float() for x in tensors_of(64, 4096, head_dims, dtype))
        q[..., 0], k[..., 0], k[0, :, 0], v[0] = 4.0, 0.0, 3 * head_dims[0] ** 0.5, 0.0
        tensors = q.to(dtype), k.to(dtype), v.to(dtype)
        truth = expect(*tensors, causal=True, native=True).out
        mask = torch.ones(64, 4096, dtype=torch.bool, device="cuda").tril(4096 - 64)
        errors_of = [
            (run(*tensors, backend="fa3", **arguments)[0].double() - truth).square().mean().sqrt()
            for arguments in ({"causal": True}, {"custom_mask": mask})
        ]
        assert errors_of[1] <= 1.02 * errors_of[0]


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("lengths", [(1, 5000), (130, 700), (2000, 2000)])
def test_repeats_are_bit_equal(dtype: torch.dtype, lengths: tuple[int, int]) -> None:
    for head_dims in native_classes(dtype):
        tensors = tensors_of(*lengths, head_dims, dtype)
        first = run(*tensors, causal=True, backend="fa3")
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(30):
            for one, other in zip(run(*tensors, causal=True, backend="fa3"), first, strict=True):
                differ += (one != other).any()
        assert differ.item() == 0


@pytest.mark.parametrize("dtype", FP8)
def test_rows_that_tma_cannot_address_are_widened(dtype: torch.dtype) -> None:
    """The bits of the widened call then: what is 8 bytes off in one tensor widens all three."""
    tensors = tensors_of(77, 203, (128, 128), dtype)
    assert is_native(told_of(tensors))
    wide = run(*(x.bfloat16() for x in tensors), causal=True, backend="fa3")
    for number in range(3):
        moved = list(tensors)
        x = moved[number]
        moved[number] = normal(*x.shape[:2], 136, dtype=dtype)[..., :128].copy_(x)
        told = told_of(tuple(moved))
        assert told.dtype == "bfloat16"
        assert told.copies == ()
        assert same(run(*moved, causal=True, backend="fa3"), wide)


@pytest.mark.parametrize("dtype", FP8)
def test_the_range_of_weights(dtype: torch.dtype) -> None:
    """Weights down to 2^-17 of the largest of a tile count, and those below 2^-18 are lost.

    One key of a tile is ahead of the others by a power of two, which e4m3 has.
    """
    tile = told_of(tensors_of(1, 64, (128, 128), dtype, (1, 1))).tile
    assert tile is not None
    q, k, v = tensors_of(1, tile[1], (128, 128), dtype, (1, 1))
    q.zero_()
    k.zero_()
    v.fill_(1.0)
    q[0, 0, 0], k[0, 0, 0], v[0] = 1.0, 1.0, 0.0
    for power in range(1, 25):
        sm_scale = power * math.log(2.0)  # the logit of key 0; those of others are 0
        out, lse = run(q, k, v, sm_scale=sm_scale, o_dtype=torch.float32, backend="fa3")
        of_others = (tile[1] - 1) * 2.0**-power
        exact = of_others / (1 + of_others)
        if power <= 17:
            assert (out - exact).abs().amax() <= 2.0**-12 * exact
        elif power > 18:  # 2^-18 lies in the middle
            assert (out == 0).all()
        assert abs(lse.item() - math.log2(2.0**power + tile[1] - 1)) < 1e-3
