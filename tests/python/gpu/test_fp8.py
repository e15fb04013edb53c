"""q, k and v of float8, and outputs of other dtypes than the kernel's.

`test_mixed_dtypes` has float8 keys under a 16-bit query. Where float8 is widened the plain answer
is a 16-bit call on the same values: the bits must be the same. `test_fp8_native` has what is
particular to kernels that multiply in float8; features, lengths and layouts are here for both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import exactness
from cases import BFLOAT16, E4M3, E5M2, FLOAT16, PLAIN, Case, check
from exactness import Ledger, expect, normal, same
from float8_scheme import is_native
from layouts import COPIED, IN_PLACE, amid_nan, relaid
from prefill import explain, kernel_dtype, quantize_per_head
from prefill import single_prefill_with_kv_cache_return_lse as run
from split_cases import split_attention

FP8 = (E4M3, E5M2)
ALL_FP8 = ((E4M3, E4M3, E4M3), (E5M2, E5M2, E5M2), (E4M3, E5M2, E4M3), (E5M2, E4M3, E5M2))
OTHERS = ((FLOAT16,) * 3, (BFLOAT16,) * 3, (FLOAT16, E4M3, E5M2), (BFLOAT16, E5M2, E4M3))
O_DTYPES = (FLOAT16, BFLOAT16, torch.float32)
CLASSES = ((64, 64), (128, 128), (192, 128), (256, 256))
HEAD_DIMS = (*CLASSES, (72, 72), (80, 80), (96, 64), (8, 256))
LENGTHS = ((1, 300), (130, 300), (257, 63))


def name_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def inputs(
    qo_len: int,
    kv_len: int,
    head_dims: tuple[int, int] = (128, 128),
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = ALL_FP8[0],
    heads: tuple[int, int] = (4, 2),
) -> tuple[Tensor, Tensor, Tensor]:
    return exactness.inputs(qo_len, kv_len, head_dims, dtypes[0], heads, dtypes[1:])


def kernel_of(
    tensors: tuple[Tensor, Tensor, Tensor], backend: str, o_dtype: torch.dtype | None = None
) -> torch.dtype:
    """What the kernel of the call multiplies in."""
    told = explain(*tensors, backend=backend, o_dtype=o_dtype)
    assert told.dtype is not None
    dtype: torch.dtype = getattr(torch, told.dtype)
    return dtype


@pytest.mark.parametrize("o_dtype", ["default", "other 16 bits", "float32"])
@pytest.mark.parametrize("dtypes", [*ALL_FP8, *OTHERS], ids=name_of)
def test_every_output(
    backend: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], o_dtype: str
) -> None:
    """`check` compares output and LSE with float64, watches what is beside them, and repeats."""
    case = replace(PLAIN, dtypes=dtypes, o_dtype=o_dtype, group=3, lse="rows", out="wide")
    for head_dims in HEAD_DIMS:
        for qo_len, kv_len in LENGTHS:
            changes = {"head_dims": head_dims, "qo_len": qo_len, "kv_len": kv_len}
            check(replace(case, mask="causal", **changes), backend)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 200},
    "window, causal": {"window_left": 7, "mask": "causal"},
    "mask": {"mask": "bool"},
    "packed mask, window": {"mask": "packed, odd address", "window_left": 200},
    "soft cap": {"soft_cap": 30.0, "mask": "causal"},
    "tight soft cap": {"soft_cap": 0.5},
    "ALiBi": {"position": "ALiBi", "mask": "causal"},
    "slopes": {"position": "ALiBi, slopes"},
    "sinks": {"sinks": True, "mask": "causal"},
    "RoPE": {"position": "RoPE", "mask": "causal"},
    "RoPE, scaled": {"position": "RoPE, scaled"},
    "HND": {"kv_layout": "HND", "mask": "causal"},
    "HND in a cache": {"kv_layout": "HND", "view": "in a cache of heads first"},
    "fused": {"view": "fused"},
    "odd strides": {"view": "odd strides", "out": "odd strides", "lse": "transposed"},
    "scales per head": {"scale_q": "per head", "scale_k": "per head", "scale_v": "per head"},
    "scales of one element": {"scale_q": "element", "scale_k": "element", "scale_v": "element"},
    "scales as floats": {"scale_q": "float", "scale_k": "float", "scale_v": "float"},
    "more scales": {"k_scale": "element", "v_scale": "element", "scale_v": "per head"},
    "negative sm_scale": {"sm_scale": -0.2},
    "sm_scale 0": {"sm_scale": 0.0},
    "base e": {"lse_base": "e", "out": "rows"},
    "NaN in a key": {"nan_key": True, "mask": "causal"},
    "together": {
        **{"mask": "bool", "window_left": 200, "soft_cap": 30.0, "position": "ALiBi"},
        **{"sinks": True, "kv_layout": "HND", "scale_q": "per head"},
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(backend: str, feature: str) -> None:
    plain: Case = replace(PLAIN, group=4, lse="rows")
    for dtypes, o_dtype in (
        (ALL_FP8[0], "default"),
        (ALL_FP8[1], "float32"),
        (ALL_FP8[2], "other 16 bits"),
        ((BFLOAT16,) * 3, "float32"),
    ):
        for head_dims in ((64, 64), (128, 128), (72, 72)):
            for qo_len, kv_len in LENGTHS:
                changes = {"head_dims": head_dims, "qo_len": qo_len, "kv_len": kv_len}
                case = replace(plain, dtypes=dtypes, o_dtype=o_dtype, **changes)
                check(replace(case, **FEATURES[feature]), backend)


@pytest.mark.parametrize("o_dtype", O_DTYPES)
@pytest.mark.parametrize("dtypes", ALL_FP8, ids=name_of)
def test_the_same_bits_as_16_bit_inputs(
    backend: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], o_dtype: torch.dtype
) -> None:
    """Widening is exact: the kernel cannot tell. Head dims of 8 and 256 are always widened."""
    for head_dims in HEAD_DIMS:
        tensors = inputs(97, 403, head_dims, dtypes, (6, 2))
        kernel = kernel_of(tensors, backend, o_dtype)
        if kernel in FP8:
            assert (backend, len(set(dtypes))) == ("fa3", 1)
            continue
        for arguments in ({}, {"causal": True, "window_left": 50}, {"logits_soft_cap": 3.0}):
            more: dict[str, Any] = {**arguments, "o_dtype": o_dtype, "backend": backend}
            wide = run(*(tensor.to(kernel) for tensor in tensors), **more)
            assert same(run(*tensors, **more), wide)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 13, 64, 256])
@pytest.mark.parametrize("dtypes", [ALL_FP8[0], *OTHERS[:2]], ids=name_of)
def test_forced_splits(
    backend: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], num_splits: int
) -> None:
    """The parts are the same whatever is written: float32 rounds to what 16 bits have."""
    attention = partial(split_attention, num_splits=num_splits)
    for head_dims, group in (((64, 64), 8), ((128, 128), 1), ((192, 128), 5), ((72, 40), 2)):
        case = replace(PLAIN, dtypes=dtypes, head_dims=head_dims, group=group, mask="causal")
        for qo_len, kv_len in ((1, 1111), (70, 300), (129, 65)):
            lengths = {"qo_len": qo_len, "kv_len": kv_len}
            for o_dtype in ("other 16 bits", "float32"):
                each = replace(case, o_dtype=o_dtype, lse="new", sinks=True, **lengths)
                check(each, backend, attention=attention)
        tensors = inputs(70, 900, head_dims, dtypes, (2 * group, 2))
        written = kernel_dtype.written_by(kernel_of(tensors, backend, torch.float32))
        narrow, wide = (
            attention(*tensors, backend=backend, o_dtype=o_dtype, causal=True)
            for o_dtype in (written, torch.float32)
        )
        assert torch.equal(wide.to(written), narrow)


@pytest.mark.parametrize("dtypes", [ALL_FP8[0], OTHERS[1]], ids=name_of)
def test_lengths(backend: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
    """Rows align at the end, so the result of fewer rows is the tail of that of more."""
    last, most = 600, 633
    rows, keys, values = inputs(most, last, dtypes=dtypes)
    native = kernel_of((rows, keys, values), backend) in FP8
    q_buffer, k_cache, v_cache = (
        torch.full((length + 160, *x.shape[1:]), math.nan, device="cuda").to(x.dtype)
        for x, length in ((rows, most), (keys, last), (values, last))
    )
    q_buffer[:most] = rows
    ledger = Ledger()
    filled = 0
    edges = {length for tile in range(64, last, 64) for length in (tile, tile + 1)}
    for kv_len in sorted({*range(1, last + 1, 23), *edges}):
        k_cache[filled:kv_len], v_cache[filled:kv_len] = keys[filled:kv_len], values[filled:kv_len]
        filled = kv_len
        lengths = sorted({1, 64, 257, kv_len})
        cut = rows[most - lengths[-1] :], keys[:kv_len], values[:kv_len]
        for o_dtype in (BFLOAT16, torch.float32):
            whole = expect(*cut, causal=True, o_dtype=o_dtype, native=native)
            for qo_len in lengths:
                shape = (qo_len, rows.shape[1], values.shape[2])
                given = amid_nan(shape, (8, 0, 0), (8, 0, 0), o_dtype, "cuda")
                out, lse = run(
                    *(q_buffer[most - qo_len : most], k_cache[:kv_len], v_cache[:kv_len]),
                    **{"backend": backend, "out": given.view, "o_dtype": o_dtype, "causal": True},
                )
                label = f"qo_len {qo_len}, kv_len {kv_len}, {o_dtype}"
                ledger.result(label, out, lse, whole.last_rows(qo_len))
                ledger.none(f"{label}: written beside out", given.written_outside())
    ledger.finish()


@pytest.mark.parametrize("dtypes", [*ALL_FP8, *OTHERS], ids=name_of)
def test_flat_scores_over_many_keys(
    backend: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    """The mean of v comes out: sums over 32k values of one sign keep their digits.

    All weights of a row are alike, and may be off by half a unit of the kernel's dtype alike. Those
    of float8 are exactly the largest there is; what is off are the sums of each tile.
    """
    q, k, v = inputs(65, 32768, (64, 64), dtypes)
    v = (v.float() + 3.0).to(dtypes[2])
    mean = v.double().mean(0).repeat_interleave(2, 0)
    for o_dtype in O_DTYPES:
        kernel = kernel_of((q, k, v), backend, o_dtype)
        native = kernel in FP8
        unit = 2.0**-8 if native else torch.finfo(kernel).eps / 2
        o_unit = torch.finfo(o_dtype).eps / 2
        out, lse = run(q, k, v, sm_scale=0.0, o_dtype=o_dtype, backend=backend)
        error = ((out.double() - mean) / mean).abs().amax().item()
        assert error <= unit + o_unit + 2.0**-16
        assert (lse - 15.0).abs().amax() < 1e-4
        out, _ = run(q, k, v, sm_scale=2.0**-10, o_dtype=o_dtype, backend=backend)
        expected = expect(q, k, v, sm_scale=2.0**-10, o_dtype=o_dtype, native=native)
        assert ((out.double() - expected.out).abs() <= expected.worst).all()


@pytest.mark.parametrize("head_dims", CLASSES)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_float32_keeps_what_16_bits_round_off(
    backend: str, dtype: torch.dtype, head_dims: tuple[int, int]
) -> None:
    """Around 3 the rounding of weights averages out: that of the output is most of the error."""
    q, k, v = inputs(300, 2000, head_dims, (dtype,) * 3)
    v = v + 3.0
    exact = expect(q, k, v, o_dtype=torch.float32).out
    narrow, wide = (
        run(q, k, v, o_dtype=o_dtype, backend=backend)[0].double() - exact
        for o_dtype in (dtype, torch.float32)
    )
    assert wide.square().mean().sqrt() < narrow.square().mean().sqrt() / 4


@pytest.mark.parametrize("o_dtype", O_DTYPES)
def test_every_value(backend: str, o_dtype: torch.dtype) -> None:
    """The V of the only key are all 256 codes: they come out as they are."""
    for dtype in FP8:
        codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype)
        q = torch.zeros(1, 2, 64, dtype=dtype, device="cuda")
        for v in (codes.view(1, 2, 128), codes.view(1, 1, 256)):
            out, _ = run(q, q[:, : v.shape[1]], v, o_dtype=o_dtype, backend=backend)
            exact = v.to(o_dtype).expand_as(out)
            assert torch.equal(out.isfinite(), exact.isfinite())
            assert torch.equal(out[exact.isfinite()], exact[exact.isfinite()])


@pytest.mark.parametrize("dtype", FP8)
def test_rotation_saturates(backend: str, dtype: torch.dtype) -> None:
    """A pair at the largest value turns beyond it, and stays there, as in the reference."""
    largest = torch.finfo(dtype).max
    q, k, v = inputs(40, 200, (64, 64), (dtype,) * 3)
    k[:, :, ::3] = torch.full((1,), largest, device="cuda").to(dtype)
    k[:, :, 32::3] = torch.full((1,), largest, device="cuda").to(dtype)
    arguments: dict[str, Any] = {
        "pos_encoding_mode": "ROPE_LLAMA",
        "sm_scale": 0.05 / largest,
        "causal": True,
    }
    out, lse = run(q, k, v, backend=backend, **arguments)
    ledger = Ledger()
    ledger.result("rotated", out, lse, expect(q, k, v, **arguments))
    ledger.finish()


@pytest.mark.parametrize("layout", [*IN_PLACE, *COPIED])
@pytest.mark.parametrize("o_dtype", [BFLOAT16, torch.float32])
def test_layouts(backend: str, o_dtype: torch.dtype, layout: str) -> None:
    """The same bits from other addresses, amid NaN; copied where a kernel cannot read there."""
    more: dict[str, Any] = {"causal": True, "backend": backend, "o_dtype": o_dtype}
    for head_dims in HEAD_DIMS:
        tensors = inputs(77, 203, head_dims)
        moved = [relaid(tensor, layout) for tensor in tensors]
        assert same(run(*moved, **more), run(*tensors, **more))


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (12, 4), (40, 8)])
def test_heads(backend: str, heads: tuple[int, int]) -> None:
    ledger = Ledger()
    for head_dim in (64, 128):
        for o_dtype in O_DTYPES:
            tensors = inputs(130, 203, (head_dim, head_dim), heads=heads)
            out, lse = run(*tensors, causal=True, o_dtype=o_dtype, backend=backend)
            native = kernel_of(tensors, backend, o_dtype) in FP8
            expected = expect(*tensors, causal=True, o_dtype=o_dtype, native=native)
            ledger.result(f"{head_dim}, {o_dtype}", out, lse, expected)
    ledger.finish()


@pytest.mark.parametrize("lengths", [(1, 5000), (130, 700), (1000, 1000)])
@pytest.mark.parametrize("o_dtype", [BFLOAT16, torch.float32])
def test_repeats_are_bit_equal(
    backend: str, o_dtype: torch.dtype, lengths: tuple[int, int]
) -> None:
    tensors = inputs(*lengths)
    more: dict[str, Any] = {"causal": True, "backend": backend, "o_dtype": o_dtype}
    first = run(*tensors, **more)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        for one, other in zip(run(*tensors, **more), first, strict=True):
            differ += (one != other).any()
    assert differ.item() == 0


@pytest.mark.parametrize("o_dtype", [BFLOAT16, torch.float32])
def test_in_a_graph(backend: str, o_dtype: torch.dtype) -> None:
    """Quantised and attended to: capture refuses whatever waits for the device."""
    q, k, v = inputs(70, 150, dtypes=(BFLOAT16,) * 3)

    def attend() -> Any:
        (q8, scale_q), (k8, scale_k), (v8, scale_v) = (quantize_per_head(x) for x in (q, k, v))
        scales = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
        return run(q8, k8, v8, **scales, causal=True, o_dtype=o_dtype, backend=backend)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    q.mul_(-3.0)
    graph.replay()
    assert same(captured, attend())


def test_quantised_attention_is_near_that_of_16_bits(backend: str) -> None:
    """Scales per head undo what quantising did, but for its rounding: half a step of e4m3."""
    q, k, v = (normal(200, heads, 128, dtype=BFLOAT16, seed=heads) for heads in (8, 2, 2))
    v = v + 3.0
    plain = run(q, k, v, causal=True, backend=backend)[0].float()
    (q8, scale_q), (k8, scale_k), (v8, scale_v) = (quantize_per_head(x) for x in (q, k, v))
    scales = {"scale_q": scale_q, "scale_k": scale_k, "scale_v": scale_v}
    out = run(q8, k8, v8, **scales, causal=True, backend=backend)[0].float()
    assert (out - plain).square().mean().sqrt() < 2.0**-4 * plain.square().mean().sqrt()


def test_what_is_told(backend: str) -> None:
    tensors = inputs(2000, 2000)
    told = explain(*tensors, o_dtype=torch.float32, backend=backend)
    dtype = "float8_e4m3fn" if is_native(told) else "float16"
    assert told.kernel == f"{backend}_{dtype}_128x128"
    assert told.num_splits >= 1
    assert told.num_whole_tiles == 0
    assert told.passes[-1].startswith("out: float32")
    told = explain(*tensors, backend=backend)
    dtype = "float8_e4m3fn" if is_native(told) else "bfloat16"
    assert told.kernel == f"{backend}_{dtype}_128x128"
    assert not any(line.startswith("out:") for line in told.passes)
