"""Diffusers' models on this package's attention, against the same models on torch's.

On the CPU; `gpu/test_diffusers.py` has the same models on the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", "0.42")

from diffusers.models import attention_dispatch as dispatch

from prefill.integrations import diffusers as integration
from prefill.integrations.diffusers import prefill_attention, register
from video_models import BATCH, MODELS, Made, assert_as_good_as_torch, hunyuan, ready

Q, KV, HQ, HK, D = 5, 9, 4, 2, 16


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    active = dispatch._AttentionBackendRegistry._active_backend
    register()
    with torch.no_grad():
        yield
    dispatch._AttentionBackendRegistry.set_active_backend(active)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", MODELS)
def test_model(
    make: Callable[[], Made], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    real = integration.single_prefill_with_kv_cache

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(integration, "single_prefill_with_kv_cache", counted)
    assert_as_good_as_torch(*ready(make(), dtype))
    assert calls
    assert any(call["custom_mask"] is not None for call in calls) == (make is hunyuan)


def tensors(q_length: int = Q, kv_length: int = KV, kv_heads: int = HK) -> list[Tensor]:
    shapes = ((BATCH, q_length, HQ, D), (BATCH, kv_length, kv_heads, D))
    q, k, v = (torch.randn(shape).half() for shape in (*shapes, shapes[1]))
    return [q, k, v]


def torchs_attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    heads_first = [x.float().transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, enable_gqa=True, **arguments
    )
    return out.transpose(1, 2)


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.float(), other, rtol=2e-3, atol=1e-3)


def test_dispatch_takes_it_by_name() -> None:
    q, k, v = tensors()
    out = dispatch.dispatch_attention_fn(q, k, v, scale=0.3, enable_gqa=True, backend="prefill")
    same(out, torchs_attention(q, k, v, scale=0.3))
    with dispatch.attention_backend("prefill"):
        assert torch.equal(dispatch.dispatch_attention_fn(q, k, v, scale=0.3), out)


def test_causal() -> None:
    q, k, v = tensors(KV)
    same(prefill_attention(q, k, v, is_causal=True), torchs_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("shape", [(1, 1, Q, KV), (BATCH, 1, Q, KV), (BATCH, 1, 1, KV)])
def test_masks_of_pairs(shape: tuple[int, ...]) -> None:
    q, k, v = tensors()
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    same(prefill_attention(q, k, v, mask), torchs_attention(q, k, v, attn_mask=mask))


def test_mask_of_keys() -> None:
    q, k, v = tensors()
    mask = torch.arange(KV) < torch.tensor([9, 4])[:, None]
    right = torchs_attention(q, k, v, attn_mask=mask[:, None, None])
    same(prefill_attention(q, k, v, mask), right)


def test_lse() -> None:
    """Natural, with heads last, as diffusers' flash backends return it."""
    q, k, v = tensors()
    out, lse = prefill_attention(q, k, v, return_lse=True)
    keys = k.float().repeat_interleave(HQ // HK, 2)
    logits = torch.einsum("bihd,bjhd->bihj", q.float(), keys) * D**-0.5
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-5)
    same(out, torchs_attention(q, k, v))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, "forward pass only"),
        ({"parallel_config": object()}, NotImplementedError, "context parallelism"),
        ({"is_causal": True}, ValueError, "5 queries, 9 keys and no mask"),
        ({"attn_mask": torch.zeros(BATCH, 1, 1, KV)}, TypeError, "dtype torch.float32"),
        ({"attn_mask": torch.ones(BATCH, HQ, Q, KV).bool()}, ValueError, "one mask for all heads"),
        ({"attn_mask": torch.ones(Q, KV).bool()}, ValueError, "expected"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prefill_attention(*tensors(), **arguments)


def test_float32_is_refused() -> None:
    with pytest.raises(TypeError, match="the model computes in"):
        prefill_attention(*(x.float() for x in tensors()))


def test_training_is_refused() -> None:
    q, k, v = tensors()
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="forward pass only"):
        prefill_attention(q.requires_grad_(), k, v)


def test_registering_again_changes_the_backend() -> None:
    register("fa3")
    with pytest.raises(NotImplementedError, match="backend='fa3' cannot run this call"):
        dispatch.dispatch_attention_fn(*tensors(), backend="prefill")
    register()
    dispatch.dispatch_attention_fn(*tensors(), backend="prefill")
    names = [member.value for member in dispatch.AttentionBackendName]
    assert names.count("prefill") == 1
    assert dispatch.AttentionBackendName["PREFILL"] == "prefill"


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend='fa9' is unknown"):
        register("fa9")


def test_compiles_whole() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dispatch.dispatch_attention_fn(q, k, v, backend="prefill")

    given = tensors()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    same(compiled(*given), call(*given).float())
