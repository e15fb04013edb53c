"""Streams, devices, graphs, threads, repeats: where and when a call runs must not show in it."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import normal, same
from prefill import explain, single_prefill_with_kv_cache, support

HEADS, KV_HEADS, D = 8, 2, 128


def inputs(qo_len: int = 130, kv_len: int = 700, seed: int = 0) -> list[Tensor]:
    lengths = ((qo_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    return [
        normal(length, heads, D, dtype=torch.bfloat16, seed=3 * seed + n)
        for n, (length, heads) in enumerate(lengths)
    ]


def run(tensors: list[Tensor], backend: str, **kwargs: Any) -> Any:
    return single_prefill_with_kv_cache(
        *tensors, causal=True, return_lse=True, backend=backend, **kwargs
    )


def test_every_backend_runs_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not compute capability 9.0")
    build = support.native().build
    assert build is not None, support.native().missing
    for name in build.archs:
        assert explain(*inputs(), backend=name).backend == name
    if "fa3" in build.archs:
        assert explain(*inputs()).backend == "fa3"


def test_repeats_are_bit_equal(backend: str) -> None:
    for qo_len, kv_len in ((1, 5000), (130, 700), (1000, 1000)):
        tensors = inputs(qo_len, kv_len)
        first = run(tensors, backend)
        for _ in range(100):
            assert same(first, run(tensors, backend))


def test_repeats_under_load_are_bit_equal(backend: str) -> None:
    tensors = inputs(512, 2048)
    first = run(tensors, backend)
    load = torch.randn(4096, 4096, device="cuda")
    beside = torch.cuda.Stream()
    results = []
    for _ in range(30):
        with torch.cuda.stream(beside):
            load = (load @ load).clamp(-1, 1)
        results.append(run(tensors, backend))
    torch.cuda.synchronize()
    assert all(same(first, result) for result in results)


def test_work_waits_for_its_stream(backend: str) -> None:
    """Inputs are filled on a side stream behind a delay; a call on another stream reads NaN."""
    tensors = inputs()
    expected = run(tensors, backend)
    late = [torch.full_like(tensor, math.nan) for tensor in tensors]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, tensors, strict=True):
            target.copy_(source)
        result = run(late, backend)
        after = result[0].clone()
    side.synchronize()
    assert same(expected, result)
    assert torch.equal(after, expected[0])


def test_two_streams_at_once(backend: str) -> None:
    calls = [inputs(64, 4096, seed=1), inputs(100, 3000, seed=2)]
    expected = [run(tensors, backend) for tensors in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(100):
        for which in (0, 1):
            with torch.cuda.stream(streams[which]):
                results[which].append(run(calls[which], backend))
    torch.cuda.synchronize()
    for which in (0, 1):
        assert all(same(expected[which], result) for result in results[which])


def test_threads(backend: str) -> None:
    calls = [inputs(64 + n, 1000 + n, seed=n) for n in range(4)]
    expected = [run(tensors, backend) for tensors in calls]
    wrong: list[int] = []

    def work(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [run(calls[which], backend) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        if not all(same(expected[which], result) for result in results):
            wrong.append(which)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_another_device(backend: str) -> None:
    """The tensors' device counts, not the current one; nor does a call change the latter."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = inputs()
    expected = run(tensors, backend)
    there = [tensor.to("cuda:1") for tensor in tensors]
    with torch.cuda.device(0):
        result = run(there, backend)
        assert torch.cuda.current_device() == 0
        assert result[0].device == torch.device("cuda", 1)
        assert same(expected, result)
        with torch.cuda.stream(torch.cuda.Stream(device=1)):
            torch.cuda._sleep(50_000_000)
            late = [torch.full_like(tensor, math.nan).copy_(tensor) for tensor in there]
            result = run(late, backend)
        torch.cuda.synchronize(1)
        assert same(expected, result)
    with pytest.raises(ValueError, match=r"k is on cuda:0 and q is on cuda:1"):
        run([there[0], *tensors[1:]], backend)


def test_graph_capture_and_replay(backend: str) -> None:
    tensors = inputs()
    held = [tensor.clone() for tensor in tensors]
    run(held, backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(held, backend)
    for seed in (1, 2, 3):
        for target, source in zip(held, inputs(seed=seed), strict=True):
            target.copy_(source)
        for part in result:
            part.fill_(math.nan)
        graph.replay()
        assert same(result, run(inputs(seed=seed), backend))


def test_graph_capture_of_copies_and_scales(backend: str) -> None:
    """Copies and folded scales are made on the device, so that a replay sees new values."""
    q, k, v = inputs()
    odd = torch.empty(*k.shape[:2], D + 1, dtype=k.dtype, device="cuda")[..., :D].copy_(k)
    factor = torch.tensor(1.0, device="cuda")
    run([q, odd, v], backend, k_scale=factor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run([q, odd, v], backend, k_scale=factor)
    odd.mul_(0.5)
    factor.fill_(3.0)
    graph.replay()
    assert same(result, run([q, odd.contiguous(), v], backend, k_scale=factor))


def test_no_synchronisation(backend: str) -> None:
    tensors = inputs()
    scale = torch.tensor(0.5, device="cuda")
    run(tensors, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(tensors, backend, k_scale=scale, v_scale=scale, window_left=7)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_but_results_is_allocated(backend: str) -> None:
    tensors = inputs(50, 60)  # one KV tile, which nothing can split
    told = explain(*tensors, causal=True, backend=backend)
    assert (told.num_splits, told.packed_heads) == (1, 1)
    out, lse = run(tensors, backend)

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    run(tensors, backend, out=out, lse=lse)
    assert allocations() == before
    run(tensors, backend)
    assert allocations() == before + 2


def test_a_call_leaves_nothing_for_the_next(backend: str) -> None:
    """A masked, windowed or scaled call between two equal ones changes nothing."""
    tensors = inputs(20, 40)
    first = run(tensors, backend)
    single_prefill_with_kv_cache(*tensors, custom_mask=torch.zeros(20, 40, device="cuda").bool())
    run(tensors, backend, window_left=1, sm_scale=5.0)
    assert same(first, run(tensors, backend))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(backend: str, compiler: str) -> None:
    torch._dynamo.reset()

    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run([q * 2, k, v], backend)
        return out + 1, lse

    tensors = inputs()
    compiled = torch.compile(block, fullgraph=True, backend=compiler)
    for one, other in zip(compiled(*tensors), block(*tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_reduce_overhead(backend: str) -> None:
    """The compiler captures the call into a CUDA graph of its own, and replays it on other data."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda *tensors: run(list(tensors), backend), fullgraph=True, mode="reduce-overhead"
    )
    for seed in range(5):  # warms up, records, replays
        tensors = inputs(seed=seed)
        expected = run(tensors, backend)
        torch.compiler.cudagraph_mark_step_begin()
        assert same(compiled(*tensors), expected)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_compiled_graph_copes_with_any_address(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: run(list(tensors), backend), fullgraph=True)
    q, k, v = inputs()
    expected = run([q, k, v], backend)
    assert same(compiled(q, k, v), expected)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    assert same(compiled(odd, k, v), expected)


@pytest.mark.parametrize("op", ["attention", "prepared_attention"])
def test_opcheck(backend: str, op: str) -> None:
    q, k, v = inputs(20, 30)
    out = torch.empty_like(q)
    lse = torch.empty(20, HEADS, device="cuda")
    scales = (torch.rand(HEADS, device="cuda"), None, torch.rand(KV_HEADS, device="cuda"))
    terms = (None, torch.rand(HEADS, device="cuda"), torch.rand(HEADS, device="cuda"))
    rope = (False, 1.0, 1e4)
    arguments = (
        *(backend, q, k, v, out, lse, *scales, *terms, 5, 0, True),
        *(*rope, 2.0, 0.1, 1.0, 1.0, 0),
    )
    torch.library.opcheck(getattr(torch.ops.prefill, op).default, arguments)


def test_fork_after_import(backend: str) -> None:
    """Importing touches no device, so that a child may use it."""
    program = f"""
        import os, prefill, torch
        assert not torch.cuda.is_initialized()
        child = os.fork()
        if child == 0:
            q = torch.ones(5, 2, 64, device="cuda", dtype=torch.float16)
            out = prefill.single_prefill_with_kv_cache(q, q, q, backend={backend!r})
            os._exit(0 if bool((out == 1).all()) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_both_backends_in_turn(backend: str) -> None:
    """Kernels of both backends live in one process and take turns."""
    tensors = inputs()
    expected = run(tensors, backend)
    for other in ("auto", "fa2", backend):
        if other == "fa2" and explain(*tensors, backend=other).backend is None:
            continue
        run(tensors, other)
    assert same(expected, run(tensors, backend))
