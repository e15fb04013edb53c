"""The oracle's own parts on a GPU: the CPU's values, no synchronisation, graph capture."""

from contextlib import contextmanager

import pytest
import torch

from naive import make_qkv
from prefill import merge_state, merge_states, packbits, segment_packbits
from prefill.reference import reference_attention
from prefill.request import make_request

HEADS = torch.linspace(0.5, 1.5, 4)
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 33},
    "cap": {"logits_soft_cap": 3.0, "causal": True},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "causal": True},
    "sinks": {"sinks": HEADS, "lse_base": "e"},
    "scales": {"scale_q": HEADS, "scale_k": HEADS[:2], "scale_v": HEADS[2:]},
    "mask": {"custom_mask": torch.arange(70 * 150).view(70, 150) % 3 != 0},
}
CALLS["packed"] = {"packed_custom_mask": packbits(CALLS["mask"]["custom_mask"], "little")}
DTYPES = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def to_gpu(arguments):
    return {n: a.cuda() if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}


def attend(q, k, v, **arguments):
    return reference_attention(make_request(q, k, v, return_lse=True, **arguments))


@contextmanager
def no_waiting():
    """Make anything in the block that waits for the device an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_cpu(name, dtype):
    q, k, v = make_qkv(70, 150, (4, 2), (64, 32), dtype)
    expected = attend(q, k, v, o_dtype=torch.float32, **CALLS[name])
    given = attend(q.cuda(), k.cuda(), v.cuda(), o_dtype=torch.float32, **to_gpu(CALLS[name]))
    for ours, exact in zip(given, expected, strict=True):
        assert ours.is_cuda
        torch.testing.assert_close(ours.cpu(), exact, rtol=3e-7, atol=3e-7)


def test_tf32_has_no_say(monkeypatch):
    q, k, v = (x.cuda() for x in make_qkv(100, 300, (4, 2), 64, spread=3.0))
    exact = attend(q, k, v, o_dtype=torch.float32)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    fast = attend(q, k, v, o_dtype=torch.float32)
    assert torch.equal(fast[0], exact[0])
    assert torch.equal(fast[1], exact[1])


@pytest.mark.parametrize("name", CALLS)
def test_does_not_wait_for_the_device(name):
    q, k, v = (x.cuda() for x in make_qkv(70, 150, (4, 2), 64))
    arguments = to_gpu(CALLS[name])
    with no_waiting():
        attend(q, k, v, **arguments)


@pytest.mark.parametrize("name", CALLS)
def test_graph_capture_and_replay(name):
    q, k, v = (x.cuda() for x in make_qkv(70, 150, (4, 2), 64))
    arguments = to_gpu(CALLS[name])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(q, k, v, **arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, **arguments)
    q.copy_(q.flip(0))
    graph.replay()
    for ours, expected in zip(captured, attend(q, k, v, **arguments), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_stays_within_its_memory():
    q, k, v = (x.cuda() for x in make_qkv(4096, 16_384, (8, 8), 128, torch.bfloat16))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, v, causal=True, pos_encoding_mode="ALIBI")
    assert torch.cuda.max_memory_allocated() - before < 512 << 20


class TestPacking:
    @pytest.mark.parametrize("order", ["big", "little"])
    def test_packbits(self, order):
        x = torch.rand(33, 77) < 0.5
        given = x.cuda()
        with no_waiting():
            packed = packbits(given, order)
        assert torch.equal(packed.cpu(), packbits(x, order))

    @pytest.mark.parametrize("indptr_device", ["cpu", "cuda"])
    def test_segment_packbits(self, indptr_device):
        x, bounds = torch.rand(100) < 0.5, torch.tensor([0, 3, 3, 50, 100])
        expected = segment_packbits(x, bounds, "little")
        packed, new_bounds = segment_packbits(x.cuda(), bounds.to(indptr_device), "little")
        assert packed.is_cuda
        assert new_bounds.device.type == indptr_device
        assert torch.equal(packed.cpu(), expected[0])
        assert torch.equal(new_bounds.cpu(), expected[1])


def test_merging_does_not_wait():
    o, lse = torch.randn(9, 5, 4, 64, device="cuda").half(), torch.randn(9, 5, 4, device="cuda")
    with no_waiting():
        merge_states(o, lse)
        merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])


def test_merging_equals_the_cpu():
    o, lse = torch.randn(9, 5, 4, 64), torch.randn(9, 5, 4)
    lse[0], lse[1, 0] = -torch.inf, -torch.inf
    expected = merge_states(o, lse)
    for ours, exact in zip(merge_states(o.cuda(), lse.cuda()), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), exact, rtol=1e-6, atol=1e-6)
