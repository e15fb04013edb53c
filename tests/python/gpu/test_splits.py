"""Keys split by force and by rule: each part and their sum, whatever the parts see.

The cases are `split_cases`; here is also what a covering set does not say: parts without keys, NaN
and infinity, memory that holds NaN, repeats, graphs and streams.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import check, per_head, random_mask
from exactness import LOG2_E, Ledger, expect, guarded, inputs, poisoned, same
from prefill import explain, packbits
from prefill.info import NATIVE_BACKENDS
from split_cases import NUM_SPLITS, SplitCase, split_attention, split_cases

DTYPES = (torch.float16, torch.bfloat16)
SPLIT = [n for n in NUM_SPLITS if n > 1]
CASES = [
    pytest.param(backend, each, id=f"{backend}-{number}")
    for backend in NATIVE_BACKENDS
    for number, each in enumerate(split_cases())
]


def run(tensors: tuple[Tensor, ...], backend: str, num_splits: int, **kwargs: Any) -> Any:
    q, k, v = tensors
    return split_attention(
        q, k, v, backend=backend, num_splits=num_splits, return_lse=True, **kwargs
    )


@pytest.mark.parametrize(("backend", "each"), CASES, indirect=["backend"])
def test_every_two_values(backend: str, each: SplitCase) -> None:
    check(each.case, backend, attention=partial(split_attention, num_splits=each.num_splits))


@pytest.mark.parametrize("num_splits", [1, 4, 17, 255, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_parts_as_are_taken(backend: str, dtype: torch.dtype, num_splits: int) -> None:
    """Of 20,000 keys each part has some; of 300 most have none."""
    ledger = Ledger()
    for qo_len, kv_len in ((1, 20_000), (16, 20_000), (33, 300), (1, 1)):
        tensors = inputs(qo_len, kv_len, dtype=dtype, heads=(8, 1))
        for causal in (False, True):
            out, lse = run(tensors, backend, num_splits, causal=causal)
            label = f"{qo_len} x {kv_len}, causal {causal}"
            ledger.result(label, out, lse, expect(*tensors, causal=causal))
    ledger.finish()


EMPTY: dict[str, tuple[int, int, dict[str, Any]]] = {
    "more rows than keys": (129, 65, {"causal": True}),
    "many more rows than keys": (700, 3, {"causal": True}),
    "a window at the end": (40, 4097, {"causal": True, "window_left": 10}),
    "a window and no causal bound": (64, 1111, {"window_left": 0}),
    "a window and more rows than keys": (200, 77, {"causal": True, "window_left": 5}),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("num_splits", NUM_SPLITS)
@pytest.mark.parametrize("name", EMPTY)
def test_parts_that_see_nothing(backend: str, name: str, num_splits: int, sinks: bool) -> None:
    qo_len, kv_len, bounds = EMPTY[name]
    ledger = Ledger()
    for head_dims, heads in (((64, 64), (4, 2)), ((128, 128), (16, 2)), ((192, 128), (5, 1))):
        tensors = inputs(qo_len, kv_len, head_dims, torch.bfloat16, heads)
        values = per_head(heads[0], -2.0, 3.0)
        arguments = bounds | ({"sinks": values} if sinks else {})
        out, lse = run(tensors, backend, num_splits, **arguments)
        ledger.result(f"{head_dims}, {heads}", out, lse, expect(*tensors, **arguments))
        empty = max(0, qo_len - kv_len)
        assert (out[:empty] == 0).all()
        nothing = values * LOG2_E if sinks else torch.full_like(values, -math.inf)
        torch.testing.assert_close(lse[:empty], nothing.expand(empty, -1), rtol=2.0**-22, atol=0)
    ledger.finish()


@pytest.mark.parametrize("num_splits", NUM_SPLITS)
@pytest.mark.parametrize("group", [1, 8])
def test_mask_rows_that_show_nothing(backend: str, group: int, num_splits: int) -> None:
    """No row, one key in one part, the keys of one part alone; results lie amid NaN."""
    qo_len, kv_len = 70, 1500
    tensors = inputs(qo_len, kv_len, heads=(2 * group, 2))
    ledger = Ledger()
    for seen in (slice(0, 0), slice(777, 778), slice(1400, 1500), slice(0, 30)):
        keep = torch.zeros(qo_len, kv_len, dtype=torch.bool, device="cuda")
        keep[::3, seen] = True
        expected = expect(*tensors, custom_mask=keep)
        without = ~keep.any(1)
        bits = packbits(keep, bitorder="little")
        for mask in ({"custom_mask": keep}, {"packed_custom_mask": bits}):
            buffer, out = guarded(qo_len, 2 * group, 128, dtype=torch.float16)
            lse_buffer, lse = guarded(qo_len, 2 * group, dtype=torch.float32)
            run(tensors, backend, num_splits, out=out, lse=lse, **mask)
            ledger.result(f"{seen}, {list(mask)}", out, lse, expected)
            assert (out[without] == 0).all()
            assert (lse[without] == -math.inf).all()
            assert buffer.isnan().sum() == 32 * 2 * group * 128
            assert lse_buffer.isnan().sum() == 32 * 2 * group
    ledger.finish()


def kinds(result: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Where NaN, infinity and its negative are."""
    return [found for x in result for found in (x.isnan(), x == math.inf, x == -math.inf)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_splits", SPLIT)
def test_bad_keys_and_values_reach_the_rows_they_reach_unsplit(
    backend: str, num_splits: int, bad: float
) -> None:
    q, k, v = inputs(33, 1500, dtype=torch.bfloat16, heads=(8, 2))
    bad_k, bad_key_0, bad_v, worse_v = k.clone(), k.clone(), v.clone(), v.clone()
    bad_k[1490, 0] = bad  # seen by the last rows alone where causal
    bad_key_0[0, 1, 5] = bad
    bad_v[700, 0, 3] = bad
    worse_v[20, :, 7], worse_v[1400, :, 7] = bad, -bad
    for tensors, bounds in (
        ((q, bad_k, v), {"causal": True}),
        ((q, bad_k, v), {"custom_mask": random_mask(33, 1500)}),
        ((q, bad_k, v), {"logits_soft_cap": 5.0}),
        ((q, bad_key_0, v), {"causal": True}),
        ((q, k, bad_v), {}),
        ((q, k, worse_v), {}),
        ((q, bad_k, worse_v), {}),
    ):
        whole = run(tensors, backend, 1, **bounds)
        assert not all(x.isfinite().all() for x in whole)
        split = run(tensors, backend, num_splits, **bounds)
        for found, right in zip(kinds(split), kinds(whole), strict=True):
            assert torch.equal(found, right), bounds


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_splits", NUM_SPLITS)
def test_bad_keys_that_no_row_sees_leave_no_trace(
    backend: str, num_splits: int, bad: float
) -> None:
    q, k, v = inputs(40, 1500, heads=(8, 2))
    keep = random_mask(40, 1500)
    keep[:, 600:900] = False
    hidden, past = k.clone(), k.clone()
    hidden[600:900] = bad
    past[:1400] = bad
    for keys, arguments in (
        (hidden, {"custom_mask": keep}),
        (past, {"causal": True, "window_left": 60}),
    ):
        clean = run((q, k, v), backend, num_splits, **arguments)
        assert clean[0].isfinite().all()
        assert same(clean, run((q, keys, v), backend, num_splits, **arguments))


@pytest.mark.parametrize("num_splits", NUM_SPLITS)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80)])
def test_nan_past_the_last_key_and_row(
    backend: str, head_dims: tuple[int, int], num_splits: int
) -> None:
    for qo_len, kv_len, heads in ((1, 1111, (8, 1)), (7, 65, (6, 2)), (65, 200, (4, 4))):
        tensors = inputs(qo_len, kv_len, head_dims, heads=heads)
        amid_nan = tuple(poisoned(x) for x in tensors)
        for causal in (False, True):
            clean = run(tensors, backend, num_splits, causal=causal)
            assert clean[0].isfinite().all()
            assert same(clean, run(amid_nan, backend, num_splits, causal=causal))


@pytest.mark.parametrize("num_splits", NUM_SPLITS)
def test_scratch_is_written_before_it_is_read(backend: str, num_splits: int) -> None:
    """Torch gives freed memory away again: before each call it is NaN, then infinity."""
    tensors = inputs(33, 1111, heads=(16, 2))
    for arguments in ({"causal": True}, {"causal": True, "window_left": 40}):
        first = run(tensors, backend, num_splits, **arguments)
        assert first[0].isfinite().all()
        for value in (math.nan, math.inf, -math.inf):
            freed = [torch.full((1 << bits,), value, device="cuda") for bits in range(6, 25)]
            del freed
            assert same(first, run(tensors, backend, num_splits, **arguments))


@pytest.mark.parametrize("num_splits", [0, *NUM_SPLITS])
def test_repeats_are_bit_equal(backend: str, num_splits: int) -> None:
    for qo_len, kv_len, heads in ((1, 4097, (32, 4)), (65, 1111, (7, 1)), (129, 200, (6, 6))):
        tensors = inputs(qo_len, kv_len, heads=heads)
        first = run(tensors, backend, num_splits, causal=True)
        for _ in range(20):
            assert same(first, run(tensors, backend, num_splits, causal=True))


@pytest.mark.parametrize("num_splits", [0, 1, 5, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_graph_capture_and_replay(backend: str, masked: bool, num_splits: int) -> None:
    held = inputs(16, 4097, heads=(16, 2))
    mask = random_mask(16, 4097)
    arguments: dict[str, Any] = {"custom_mask": mask} if masked else {"causal": True}
    run(held, backend, num_splits, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(held, backend, num_splits, **arguments)
    ledger = Ledger()
    for factor in (1.0, -0.5, 2.0):
        for tensor in held:
            tensor.copy_(tensor.flip(0) * factor)
        mask.copy_(mask.flip(1))
        for part in result:
            part.fill_(math.nan)
        graph.replay()
        assert same(result, run(held, backend, num_splits, **arguments))
        ledger.result(f"times {factor}", *result, expect(*held, **arguments))
    ledger.finish()


@pytest.mark.parametrize("num_splits", [0, 5, 64])
def test_two_streams_at_once(backend: str, num_splits: int) -> None:
    """Two calls of one shape, so that shared scratch would show."""
    first = inputs(16, 4097, heads=(16, 2))
    calls = [first, tuple(x.flip(0).contiguous() for x in first)]
    expected = [run(tensors, backend, num_splits, causal=True) for tensors in calls]
    assert not same(*expected)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(50):
        for which in (0, 1):
            with torch.cuda.stream(streams[which]):
                results[which].append(run(calls[which], backend, num_splits, causal=True))
    torch.cuda.synchronize()
    for which in (0, 1):
        assert all(same(expected[which], result) for result in results[which])


@pytest.mark.parametrize("num_splits", [0, 1, 13])
def test_no_synchronisation(backend: str, num_splits: int) -> None:
    tensors = inputs(1, 4097, heads=(32, 4))
    run(tensors, backend, num_splits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(tensors, backend, num_splits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_splits", [1, 13])
def test_scratch_is_given_back(backend: str, num_splits: int) -> None:
    tensors = inputs(1, 4097, heads=(32, 4))
    out, lse = run(tensors, backend, num_splits)
    before = torch.cuda.memory_allocated()
    run(tensors, backend, num_splits, out=out, lse=lse)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("qo_len", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_splits_decode(backend: str, dtype: torch.dtype, qo_len: int) -> None:
    """Few rows over 32 thousand keys: 4 key heads alone would leave most of a GPU idle."""
    tensors = inputs(qo_len, 32768, dtype=dtype, heads=(32, 4))
    ledger = Ledger()
    for arguments, is_packed in (
        ({}, True),
        ({"causal": True}, True),
        ({"causal": True, "sinks": per_head(32, -3.0, 8.0)}, True),
        ({"pos_encoding_mode": "ALIBI", "causal": True}, False),
        ({"scale_q": per_head(32, 0.5, -1.5)}, False),
    ):
        told = explain(*tensors, backend=backend, **arguments)
        assert told.num_splits > 1, arguments
        assert (told.packed_heads > 1) == is_packed, arguments
        out, lse = run(tensors, backend, 0, **arguments)
        ledger.result(f"{list(arguments)}", out, lse, expect(*tensors, **arguments))
    ledger.finish()


def test_the_rule_leaves_short_keys_whole(backend: str) -> None:
    tensors = inputs(1, 8, heads=(32, 4))
    assert explain(*tensors, backend=backend).num_splits == 1
    ledger = Ledger()
    ledger.result("8 keys", *run(tensors, backend, 0), expect(*tensors))
    ledger.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [False, True])
def test_the_last_row_tiles_alone(backend: str, sinks: bool, dtype: torch.dtype) -> None:
    """Where row tiles are a few more than blocks, and so the last of them are in parts."""
    for heads in range(140, 900, 40):
        tensors = inputs(128, 4096, (64, 64), dtype, (heads, heads))
        told = explain(*tensors, backend=backend)
        if 0 < told.num_whole_tiles < told.num_row_tiles:
            break
    else:
        pytest.fail("no number of heads leaves a part of a last wave")
    arguments = {"sinks": per_head(heads, -3.0, 8.0)} if sinks else {}
    ledger = Ledger()
    ledger.result("out", *run(tensors, backend, 0, **arguments), expect(*tensors, **arguments))
    # Rows whose weights leave the range of the first attempt, among both kinds of row tiles.
    q, k, v = (x.clone() for x in tensors)
    q[::5, ::3] *= 30
    ledger.result("steep", *run((q, k, v), backend, 0, **arguments), expect(q, k, v, **arguments))
    ledger.finish()


@pytest.mark.parametrize("logit", [-1e9, -1e5, 0.0, 3e3, 1e4, 1e5, 1e7, 1e9])
@pytest.mark.parametrize("num_splits", [0, 2, 3, 13, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_steep_rows(
    backend: str, dtype: torch.dtype, num_splits: int, logit: float
) -> None:
    """Parts with unlike numbers of keys, all alike: weighed by their numbers at any logit."""
    qo_len, kv_len, heads = 3, 4227, (16, 2)
    _, _, v = inputs(qo_len, kv_len, dtype=dtype, heads=heads)
    v += torch.linspace(-4, 4, kv_len, device="cuda")[:, None, None].to(dtype)  # parts differ
    q = torch.ones(qo_len, heads[0], 128, dtype=dtype, device="cuda")
    k = torch.ones(kv_len, heads[1], 128, dtype=dtype, device="cuda")
    ledger = Ledger()
    for arguments in ({}, {"causal": True}, {"sinks": torch.full((16,), logit, device="cuda")}):
        arguments = {"sm_scale": logit / 128, **arguments}
        out, lse = run((q, k, v), backend, num_splits, **arguments)
        ledger.result(f"{list(arguments)}", out, lse, expect(q, k, v, **arguments))
    ledger.finish()
