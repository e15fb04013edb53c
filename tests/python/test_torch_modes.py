"""torch.export and autocast."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefill
from fakes import StubKernel, pretend

QO, KV, HQ, HK, D = 5, 9, 4, 2, 64


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubKernel:
    return pretend(monkeypatch)


def inputs(qo_len: int = QO, kv_len: int = KV) -> tuple[Tensor, ...]:
    return tuple(torch.randn(n, h, D).half() for n, h in ((qo_len, HQ), (kv_len, HK), (kv_len, HK)))


class Attention(nn.Module):
    """A call with an LSE, between other operations."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = prefill.single_prefill_with_kv_cache_return_lse(q * 2, k, v, **self.arguments)
        return out + 1, lse


EXPORTED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window, cap": {"causal": True, "window_left": 3, "logits_soft_cap": 5.0},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
}


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_native_exports_as_one_op(stub: StubKernel, name: str, strict: bool) -> None:
    module, tensors = Attention(**EXPORTED[name]), inputs()
    program = torch.export.export(module, tensors, strict=strict)
    assert targets(program).count("prefill.prepared_attention.default") == 1
    assert stub.calls == []
    others = inputs()
    same(program.module()(*others), module(*others))
    assert {call["backend"] for call in stub.calls} == {"fa3"}


@pytest.mark.parametrize("name", EXPORTED)
def test_reference_exports(name: str) -> None:
    module = Attention(**EXPORTED[name])
    program = torch.export.export(module, inputs())
    others = inputs()
    same(program.module()(*others), module(*others))


def test_export_of_any_length(stub: StubKernel) -> None:
    module = Attention(causal=True)
    rows, keys = (torch.export.Dim(name, min=2, max=2**30 - 1) for name in ("rows", "keys"))
    lengths = ({0: rows}, {0: keys}, {0: keys})
    program = torch.export.export(module, inputs(), dynamic_shapes=lengths)
    for qo_len, kv_len in ((5, 9), (17, 40), (3, 3)):
        tensors = inputs(qo_len, kv_len)
        same(program.module()(*tensors), module(*tensors))


def test_exported_program_is_saved_and_loaded(stub: StubKernel) -> None:
    module, tensors = Attention(causal=True), inputs()
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, tensors), file)
    file.seek(0)
    same(torch.export.load(file).module()(*tensors), module(*tensors))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(
    stub: StubKernel, dtype: torch.dtype, cast: torch.dtype, backend: str
) -> None:
    """q, k and v keep their dtypes, and the results their bits."""
    q, k, v = (x.to(dtype) for x in inputs())
    arguments = {"causal": True, "backend": backend, "return_lse": True}
    expected = prefill.single_prefill_with_kv_cache(q, k, v, **arguments)
    with torch.autocast("cpu", cast):
        out, lse = prefill.single_prefill_with_kv_cache(q, k, v, **arguments)
    assert out.dtype == dtype
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert all(call[name].dtype == dtype for call in stub.calls for name in ("q", "k", "v", "out"))


def test_autocast_does_not_make_float32_fit() -> None:
    q, k, v = (x.float() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="dtypes"):
        prefill.single_prefill_with_kv_cache(q, k, v)


def test_what_autocast_casts_goes_in() -> None:
    """Projections under autocast are of its dtype, whatever their weights' is."""
    heads, kv_heads = nn.Linear(32, HQ * D), nn.Linear(32, HK * D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q = heads(torch.randn(QO, 32)).view(QO, HQ, D)
        k = kv_heads(torch.randn(KV, 32)).view(KV, HK, D)
        assert prefill.single_prefill_with_kv_cache(q, k, k).dtype == torch.bfloat16


@pytest.mark.parametrize("merge_dtype", [torch.float16, torch.float32])
def test_autocast_does_not_change_merging(merge_dtype: torch.dtype) -> None:
    outs, lses = torch.randn(QO, 3, HQ, D).to(merge_dtype), torch.randn(QO, 3, HQ)
    expected = prefill.merge_states(outs, lses)
    with torch.autocast("cpu", torch.bfloat16):
        merged = prefill.merge_states(outs, lses)
    assert all(torch.equal(one, other) for one, other in zip(merged, expected, strict=True))
