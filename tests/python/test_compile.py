"""torch.compile, fake tensors, opcheck; CUDA tensors trace as fakes without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import prefill
from fakes import StubKernel, cuda, pretend

QO, KV, HQ, HK, D = 5, 9, 4, 2, 64


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubKernel:
    return pretend(monkeypatch)


def inputs(qo_len: int = QO, kv_len: int = KV) -> list[Tensor]:
    return [torch.randn(n, h, D).half() for n, h in ((qo_len, HQ), (kv_len, HK), (kv_len, HK))]


def call(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    return prefill.single_prefill_with_kv_cache(q, k, v, **kwargs)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal with lse": {"causal": True, "return_lse": True, "lse_base": "e"},
    "window": {"causal": True, "window_left": 3},
    "scales": {"scale_q": 2.0, "scale_k": torch.rand(HK), "k_scale": torch.tensor(0.5)},
    "sm_scale": {"sm_scale": 0.25, "v_scale": 3.0},
    "mask and causal": {"custom_mask": torch.rand(QO, KV) > 0.5, "causal": True},
    "packed": {"packed_custom_mask": torch.randint(0, 256, (6,), dtype=torch.uint8)},
    "cap": {"logits_soft_cap": 5.0},
    "alibi": {"pos_encoding_mode": "ALIBI", "return_lse": True},
    "slopes": {"pos_encoding_mode": "ALIBI", "alibi_slopes": torch.rand(HQ)},
    "sinks": {"sinks": torch.rand(HQ), "return_lse": True},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e5},
}


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:causal=True has no effect")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_native_compiles_whole(stub: StubKernel, compiler: str, name: str) -> None:
    tensors, kwargs = inputs(), ARGUMENTS[name]
    expected = call(*tensors, **kwargs)
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    same(compiled(*tensors, **kwargs), expected)
    assert len(stub.calls) == 2
    assert {c["backend"] for c in stub.calls} == {"fa3"}


@pytest.mark.filterwarnings("ignore:causal=True has no effect")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_reference_compiles_whole(compiler: str, name: str) -> None:
    tensors, kwargs = inputs(), ARGUMENTS[name]
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    same(compiled(*tensors, **kwargs), call(*tensors, **kwargs))


@pytest.mark.parametrize("o_dtype", [None, torch.float32])
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_fp8_compiles_whole(
    stub: StubKernel, compiler: str, q_dtype: torch.dtype, o_dtype: torch.dtype | None
) -> None:
    q, k, v = inputs()
    tensors = (q.to(q_dtype), k.to(torch.float8_e4m3fn), v.to(torch.float8_e5m2))
    arguments: dict[str, Any] = {"causal": True, "v_scale": 0.5, "o_dtype": o_dtype}
    expected = call(*tensors, **arguments)
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    same(compiled(*tensors, **arguments), expected)
    assert {c["backend"] for c in stub.calls} == {"fa3"}


def test_dynamic_lengths_compile_once(stub: StubKernel) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for qo_len, kv_len in ((5, 9), (7, 11), (8, 30), (3, 64)):
        tensors = inputs(qo_len, kv_len)
        for kwargs in ({}, {"causal": True, "return_lse": True}):
            same(compiled(*tensors, **kwargs), call(*tensors, **kwargs))
    assert counter.frame_count == 2
    assert len(stub.calls) == 16


def test_compiled_graph_copes_with_any_address(stub: StubKernel) -> None:
    """The graph was made for aligned tensors; the next call's are not."""
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, v = inputs()
    compiled(q, k, v)
    q = torch.randn(QO * HQ * D + 1).half()[1:].view(QO, HQ, D)
    same(compiled(q, k, v), call(q, k, v))
    assert all(c["q"].data_ptr() % 16 == 0 for c in stub.calls)


def test_given_results_compile(stub: StubKernel) -> None:
    def into(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        call(q, k, v, out=out, lse=lse, return_lse=True)
        return out + 1

    tensors = inputs()
    out, lse = torch.zeros(QO, HQ, D).half(), torch.zeros(QO, HQ)
    compiled = torch.compile(into, fullgraph=True, backend="aot_eager")
    result = compiled(*tensors, out, lse)
    expected, expected_lse = call(*tensors, return_lse=True)
    same(out, expected)
    same(lse, expected_lse)
    same(result, expected + 1)


def test_inductor_compiles(stub: StubKernel) -> None:
    tensors = inputs()
    compiled = torch.compile(lambda q, k, v: call(q * 2, k, v, causal=True) * 2, fullgraph=True)
    try:
        result = compiled(*tensors)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"no C++ compiler for inductor: {error}")
    q, k, v = tensors
    same(result, call(q * 2, k, v, causal=True) * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_fake_cuda_tensors_trace(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    stub = pretend(monkeypatch, cuda(9, 0))
    traced: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with FakeTensorMode():
        q = torch.empty(QO, HQ, D, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(KV, HK, D, dtype=torch.bfloat16, device="cuda")
        function = torch.compile(call, fullgraph=True, backend=keep) if compiled else call
        out, lse = function(q, k, k, causal=True, return_lse=True)
    assert out.shape == (QO, HQ, D)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (QO, HQ)
    assert lse.dtype == torch.float32
    assert out.device.type == lse.device.type == "cuda"
    assert ("prefill.prepared_attention.default" in traced) == compiled
    assert stub.calls == []


def op_arguments(lse: bool) -> tuple[Any, ...]:
    q, k, v = inputs()
    results = torch.empty(QO, HQ, D).half(), torch.empty(QO, HQ) if lse else None
    optional: tuple[Tensor | None, ...] = (None,) * 6
    if lse:
        mask = torch.randint(0, 256, (6,), dtype=torch.uint8)  # 45 bits
        scales = torch.rand(HQ), torch.rand(HK), torch.rand(HK)
        optional = (*scales, mask, torch.rand(HQ), torch.rand(HQ))
    rope = (lse, 1.0, 1e4)
    return ("fa3", q, k, v, *results, *optional, 3, 0, lse, *rope, 5.0, 0.125, 1.0, 1.0, 0)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("op", ["attention", "prepared_attention"])
def test_opcheck(stub: StubKernel, op: str, lse: bool) -> None:
    torch.library.opcheck(getattr(torch.ops.prefill, op).default, op_arguments(lse))
    assert stub.calls


def test_both_ops_have_one_signature(stub: StubKernel) -> None:
    schemas = [
        str(getattr(torch.ops.prefill, op).default._schema)
        for op in ("attention", "prepared_attention")
    ]
    assert schemas[0].split("(", 1)[1] == schemas[1].split("(", 1)[1]


def test_make_fx_sees_one_op(stub: StubKernel) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda q, k, v: call(q, k, v), tracing_mode="fake")(*inputs())
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "prefill.prepared_attention.default" in targets
