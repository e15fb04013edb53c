"""ROPE_LLAMA: the pass that rotates q and k, and the kernels on what it makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import random_mask
from exactness import Ledger, expect, guarded, inputs, poisoned
from prefill import explain, packbits, single_prefill_with_kv_cache

DTYPES = (torch.float16, torch.bfloat16)
# Half of 72, 104 and 200 is no multiple of 8.
HEAD_DIMS = [(64, 64), (72, 40), (80, 80), (96, 64), (104, 128), (128, 128), (192, 128), (200, 256)]
HEAD_DIMS += [(256, 256)]
LENGTHS = ((1, 1), (1, 333), (65, 77), (130, 261), (300, 90), (129, 1003))
FAR = 1_000_003


def run(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    return single_prefill_with_kv_cache(
        q, k, v, return_lse=True, pos_encoding_mode="ROPE_LLAMA", **kwargs
    )


def truth(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    return expect(q, k, v, pos_encoding_mode="ROPE_LLAMA", **kwargs)


def compare(ledger: Ledger, label: str, backend: str, *tensors: Tensor, **arguments: Any) -> None:
    out, lse = run(*tensors, backend=backend, **arguments)
    ledger.result(label, out, lse, truth(*tensors, **arguments))


@pytest.mark.parametrize("head_dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(backend: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """More rows than keys is a call with negative positions."""
    ledger = Ledger()
    for qo_len, kv_len in LENGTHS:
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype)
        for more in ({}, {"causal": True}, {"causal": True, "window_left": 33}, {"sm_scale": 1.0}):
            label = f"{qo_len} x {kv_len}, {more}"
            compare(ledger, label, backend, q, k, v, **more)
    ledger.finish()


@pytest.mark.parametrize("rope", [(8.0, 1e4), (0.25, 1e4), (1.0, 5e5), (3.7, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_theta(backend: str, dtype: torch.dtype, rope: tuple[float, float]) -> None:
    ledger = Ledger()
    scale, theta = rope
    plain = {}
    for head_dim in (64, 72, 128):
        q, k, v = inputs(70, 333, (head_dim, 64), dtype)
        arguments = {"rope_scale": scale, "rope_theta": theta, "causal": True}
        compare(ledger, f"{head_dim}", backend, q, k, v, **arguments)
        plain[head_dim] = run(q, k, v, backend=backend, causal=True)[0]
        assert not torch.equal(run(q, k, v, backend=backend, **arguments)[0], plain[head_dim])
    ledger.finish()


@pytest.mark.parametrize("heads", [(1, 1), (7, 7), (12, 4), (40, 8), (66, 1)])
@pytest.mark.parametrize("layout", ["NHD", "HND", "fused", "poisoned", "one head for all"])
def test_heads_and_layouts(backend: str, layout: str, heads: tuple[int, int]) -> None:
    """Views of a fused QKV, of slices, of one head; NaN after the last row and in the gaps."""
    ledger = Ledger()
    for head_dim in (64, 72):
        q, k, v = inputs(77, 203, (head_dim, head_dim), torch.bfloat16, heads)
        if layout == "one head for all":
            k, v = (x[:, :1].expand(203, heads[1], head_dim) for x in (k, v))
        expected = truth(q, k, v, causal=True)
        arguments: dict[str, Any] = {"causal": True, "backend": backend}
        if layout == "HND":
            k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
            arguments["kv_layout"] = "HND"
        elif layout == "fused":
            k, v = torch.cat((k, v), 1).split(heads[1], 1)
        elif layout == "poisoned":
            q, k, v = (poisoned(x) for x in (q, k, v))
        buffer, out = guarded(77, heads[0], head_dim, dtype=q.dtype)
        told = explain(q, k, v, pos_encoding_mode="ROPE_LLAMA", out=out, **arguments)
        assert told.backend == backend
        assert told.copies == ()
        assert told.passes == ("q: rotated", "k: rotated")
        _, lse = run(q, k, v, out=out, **arguments)
        ledger.result(f"{head_dim}", out, lse, expected)
        ledger.none("written outside", ~buffer[:16].isnan())
        ledger.none("written outside", ~buffer[93:].isnan())
    ledger.finish()


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_of_a_million(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """A window keeps few keys, all of them far: their angles are 10^6 radians and more."""
    ledger = Ledger()
    q, k, v = inputs(70, FAR, (head_dim, 64), dtype, (2, 1))
    near = (q, k[-300:], v[-300:])
    for more in ({"causal": True, "window_left": 150}, {"window_left": 0}):
        out, lse = run(q, k, v, backend=backend, **more)
        ledger.result(f"{more}", out, lse, truth(*near, first_key=FAR - 300, **more))
    ledger.finish()


def test_keys_of_a_million(backend: str) -> None:
    """Steep logits, so that few keys count; and rows at positions down to minus a million."""
    ledger = Ledger()
    q, k, v = inputs(3, FAR, (64, 64), torch.bfloat16, (2, 1))
    for more in ({"sm_scale": 1.0}, {"sm_scale": 2.0, "causal": True}):
        compare(ledger, f"{more}", backend, q, k, v, **more)
    q, k, v = inputs(FAR, 3, (64, 64), torch.float16, (1, 1))
    compare(ledger, "rows", backend, q, k, v)
    ledger.finish()


def test_far_angles_are_right(backend: str) -> None:
    """One key, all of a pair in one dim: the LSE is the cosine of the angle between."""
    ledger = Ledger()
    for head_dim in (64, 72, 256):
        k = torch.zeros(FAR, 1, head_dim, dtype=torch.float16, device="cuda")
        v = torch.zeros(FAR, 1, 8, dtype=torch.float16, device="cuda")
        k[0, 0, : head_dim // 2] = 1.0
        keep = torch.zeros(head_dim // 2, FAR, dtype=torch.bool, device="cuda")
        keep[:, 0] = True
        q = torch.zeros(head_dim // 2, 1, head_dim, dtype=torch.float16, device="cuda")
        pair = torch.arange(head_dim // 2, device="cuda")
        q[pair, 0, pair] = 1.0
        _, lse = run(q, k, v, custom_mask=keep, sm_scale=math.log(2.0), backend=backend)
        position = FAR - head_dim // 2 + pair.double()
        angle = position * 1e4 ** (-2 * pair.double() / head_dim)
        # The rotated row rounds to float16.
        ledger.at_most(f"{head_dim}", (lse[:, 0].double() - angle.cos()).abs().amax(), 2.0**-11)
    ledger.finish()


@pytest.mark.parametrize("head_dims", [(64, 64), (72, 40), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_everything_else(backend: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    ledger = Ledger()
    sinks = torch.linspace(-1.0, 4.0, 4, device="cuda")
    scales: dict[str, Any] = {
        "scale_q": torch.linspace(0.5, -1.5, 4, device="cuda"),
        "scale_k": torch.linspace(0.5, 1.0, 2, device="cuda"),
        "scale_v": torch.linspace(0.5, 2.0, 2, device="cuda"),
    }
    for qo_len, kv_len in ((1, 257), (131, 131), (70, 517), (333, 90)):
        q, k, v = inputs(qo_len, kv_len, head_dims, dtype)
        keep = random_mask(qo_len, kv_len)
        cases: list[dict[str, Any]] = [
            {"custom_mask": keep},
            {"custom_mask": keep, "window_left": 45, "sinks": sinks},
            {"logits_soft_cap": 3.0, "causal": True},
            {"logits_soft_cap": 3.0, "custom_mask": keep, "sinks": sinks, **scales},
            {"sinks": sinks, "causal": True, "window_left": 100, "lse_base": "e"},
            {"causal": True, **scales},
            {"sm_scale": -0.2},
        ]
        for arguments in cases:
            label = f"{qo_len} x {kv_len}, {list(arguments)}"
            compare(ledger, label, backend, q, k, v, **arguments)
        bits = packbits(keep, bitorder="little")
        out, lse = run(q, k, v, packed_custom_mask=bits, backend=backend)
        ledger.result(f"{qo_len} x {kv_len}, bits", out, lse, truth(q, k, v, custom_mask=keep))
    ledger.finish()


def test_agrees_with_the_reference(backend: str) -> None:
    """The package's own reference, which has another rotation than the truth of these tests."""
    for dtype in DTYPES:
        q, k, v = inputs(100, 300, (96, 64), dtype)
        arguments: dict[str, Any] = {"causal": True, "rope_scale": 2.0, "rope_theta": 5e5}
        out, lse = run(q, k, v, backend=backend, **arguments)
        exact, exact_lse = run(q, k, v, backend="reference", **arguments)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(out, exact, rtol=2 * unit, atol=2 * unit)
        torch.testing.assert_close(lse, exact_lse, rtol=2.0**-13, atol=2.0**-10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_keys_that_are_masked_leave_no_trace(backend: str, bad: float) -> None:
    q, k, v = inputs(150, 203)
    keep = random_mask(150, 203)
    keep[:, 60:90] = False
    clean, clean_lse = run(q, k, v, custom_mask=keep, backend=backend)
    k[60:90] = bad
    out, lse = run(q, k, v, custom_mask=keep, backend=backend)
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    seen = torch.ones_like(keep)
    out, _ = run(q, k, v, custom_mask=seen, backend=backend)
    assert out.isnan().all()


def test_inputs_stay_as_they_are(backend: str) -> None:
    q, k, v = inputs(100, 300)
    before = [x.clone() for x in (q, k, v)]
    run(q, k, v, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_streams_and_graphs(backend: str) -> None:
    """Calls in a row share memory of the allocator's: each sees its own rotated copies."""
    calls = [inputs(64 + 8 * i, 500 + 100 * i, heads=(8, 2)) for i in range(6)]
    alone = []
    for tensors in calls:
        alone.append(run(*tensors, causal=True, backend=backend))
        torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(3):
        results = []
        for i, tensors in enumerate(calls):
            streams[i % 3].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[i % 3]):
                results.append(run(*tensors, causal=True, backend=backend))
        torch.cuda.synchronize()
        for result, exact in zip(results, alone, strict=True):
            assert torch.equal(result[0], exact[0])
            assert torch.equal(result[1], exact[1])
    q, k, v = calls[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v, causal=True, backend=backend)
    q.copy_(q.flip(0))
    graph.replay()
    expected = run(q, k, v, causal=True, backend=backend)
    assert torch.equal(captured[0], expected[0])
    assert torch.equal(captured[1], expected[1])
