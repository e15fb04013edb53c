"""What torch's flop counter says of a call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import prefill
from fakes import StubKernel, pretend
from prefill import flops

QO, KV, HQ, HK, DQK, DVO = 5, 9, 4, 2, 64, 32
PER_PAIR = 2 * HQ * (DQK + DVO)


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> StubKernel:
    return pretend(monkeypatch)


def inputs(qo_len: int = QO, kv_len: int = KV) -> list[Tensor]:
    shapes = ((qo_len, HQ, DQK), (kv_len, HK, DQK), (kv_len, HK, DVO))
    return [torch.randn(shape).half() for shape in shapes]


def counted(call: Callable[..., Any], *tensors: Tensor, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*tensors, **kwargs)
    return counter.get_total_flops()


def call(*tensors: Tensor, **kwargs: Any) -> Any:
    return prefill.single_prefill_with_kv_cache(*tensors, **kwargs)


@pytest.mark.parametrize("kv_len", [1, 2, 7, 8, 30])
@pytest.mark.parametrize("qo_len", [1, 2, 7, 8, 30])
def test_pairs_are_those_that_are_seen(qo_len: int, kv_len: int) -> None:
    position = torch.arange(kv_len - qo_len, kv_len)[:, None]
    key = torch.arange(kv_len)
    for left in (-1, 0, 1, 5, 40):
        for right in (-1, 0, 2):
            seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
            if left >= 0:
                seen &= key >= position - left
            if right >= 0:
                seen &= key <= position + right
            assert flops.visible_pairs(qo_len, kv_len, left, right) == seen.sum().item()


def test_pairs_of_long_sequences() -> None:
    length = 10**9
    assert flops.visible_pairs(length, length, -1, 0) == length * (length + 1) // 2


@pytest.mark.parametrize(
    ("arguments", "pairs"),
    [
        ({}, 45),
        ({"causal": True}, 35),
        ({"causal": True, "window_left": 1}, 10),
        ({"causal": True, "logits_soft_cap": 5.0, "return_lse": True}, 35),
        ({"custom_mask": torch.zeros(QO, KV, dtype=torch.bool)}, 45),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, 45),
    ],
)
def test_eager_call(arguments: dict[str, Any], pairs: int) -> None:
    assert counted(call, *inputs(), **arguments) == PER_PAIR * pairs


def test_more_rows_than_keys() -> None:
    assert counted(call, *inputs(9, 5), causal=True) == PER_PAIR * 15


def test_copied_tensors_count_once() -> None:
    _, k, v = inputs()
    apart = torch.randn(QO, HQ, 2 * DQK).half()[..., ::2]
    assert counted(call, apart, k, v) == PER_PAIR * 45


def test_exported_call_counts_the_same() -> None:
    """What a graph holds is another op. (Torch compiles nothing under a counter.)"""

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return call(q, k, v, causal=True)

    program = torch.export.export(Attention(), tuple(inputs()))
    assert counted(program.module(), *inputs()) == PER_PAIR * 35


def test_as_torch_counts_its_own_attention() -> None:
    """Full attention: the same figure as that of scaled_dot_product_attention."""
    q, k, v = (torch.randn(QO, HQ, DQK).half() for _ in range(3))
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torchs = counted(torch.nn.functional.scaled_dot_product_attention, *heads_first)
    assert counted(call, q, k, v) == torchs


def test_reference_is_counted_by_its_products() -> None:
    """Plain torch: the visible pairs, whole blocks, and what keeps NaN in its place."""
    total = counted(call, *inputs(), causal=True, backend="reference")
    assert total >= PER_PAIR * 35


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The counter, which the next import loads anew."""
    known = importlib.import_module(flops.COUNTER)
    monkeypatch.setattr(torch.utils, "flop_counter", known)  # the next import sets it
    monkeypatch.delitem(sys.modules, flops.COUNTER)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return known


def knows_both_ops(counter: ModuleType) -> bool:
    ops = torch.ops.prefill
    return {ops.attention, ops.prepared_attention} <= set(counter.flop_registry)


def test_counter_is_told_when_it_is_imported(forgotten: ModuleType) -> None:
    """Whichever of the two is imported first; and other imports see no finder of ours."""
    assert knows_both_ops(forgotten)
    finders = list(sys.meta_path)
    flops.register()
    assert len(sys.meta_path) == len(finders) + 1
    fresh = importlib.import_module(flops.COUNTER)
    assert fresh is not forgotten
    assert knows_both_ops(fresh)
    assert sys.meta_path == finders


def test_looking_for_the_counter_is_not_importing_it(forgotten: ModuleType) -> None:
    """Whoever looks, as often as they like, the import after it tells the counter."""
    finders = list(sys.meta_path)
    flops.register()
    for _ in range(2):
        spec = importlib.util.find_spec(flops.COUNTER)
        assert spec is not None
        assert spec.origin == forgotten.__file__
        assert len(sys.meta_path) == len(finders) + 1
    assert knows_both_ops(importlib.import_module(flops.COUNTER))
    assert sys.meta_path == finders


def test_a_failed_import_of_the_counter_is_not_the_last(
    forgotten: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ImportError("on purpose")

    flops.register()
    with monkeypatch.context() as patch:
        patch.setattr(SourceFileLoader, "exec_module", fail)
        with pytest.raises(ImportError, match="on purpose"):
            importlib.import_module(flops.COUNTER)
    assert knows_both_ops(importlib.import_module(flops.COUNTER))
