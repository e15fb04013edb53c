"""Transformers' models on this package's attention, against the same models on "eager".

On the CPU; `gpu/test_transformers.py` has the same models on the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", "5.24")

import transformers

from language_models import (
    CLEAR_CUT,
    DECODERS,
    ENCODERS,
    assert_as_good_as_eager,
    assert_chunks_as_good_as_eager,
    assert_generates_eagers_tokens,
    bert,
    gemma2,
    llama,
    make,
    mistral,
    on,
    padded,
    result,
    tokens,
)
from prefill.integrations import transformers as integration
from prefill.integrations.transformers import prefill_attention, register
from prefill.integrations.transformers_masks import prefill_mask
from prefill.integrations.visible_keys import VisibleKeys


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", [*DECODERS, *ENCODERS])
def test_logits(model: Callable[[], Any], dtype: torch.dtype) -> None:
    assert_as_good_as_eager(make(model, dtype), input_ids=tokens(2, 19))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", [*DECODERS, *ENCODERS])
def test_padding(model: Callable[[], Any], side: str) -> None:
    mask = padded([19, 7, 1], side)
    ids = tokens(3, 19) * mask
    assert_as_good_as_eager(
        make(model, torch.float16), real=mask, input_ids=ids, attention_mask=mask
    )


@pytest.mark.parametrize("model", DECODERS)
def test_padding_with_holes(model: Callable[[], Any]) -> None:
    mask = padded([19, 12], "left")
    mask[0, 4:7] = 0
    assert_as_good_as_eager(
        make(model, torch.float16), real=mask, input_ids=tokens(2, 19), attention_mask=mask
    )


@pytest.mark.parametrize("model", DECODERS)
def test_packed_sequences(model: Callable[[], Any]) -> None:
    position_ids = torch.cat((torch.arange(11), torch.arange(8)))[None]
    packed = make(model, torch.float16)
    assert_as_good_as_eager(
        packed, input_ids=tokens(1, 19), position_ids=position_ids, use_cache=False
    )


@pytest.mark.parametrize("lengths", [(7, 7, 5), (12, 1, 1), (3, 9, 2)])
@pytest.mark.parametrize("model", DECODERS)
def test_chunks_through_the_cache(model: Callable[[], Any], lengths: tuple[int, ...]) -> None:
    ids = tokens(2, sum(lengths))
    assert_chunks_as_good_as_eager(make(model, torch.float16), ids, lengths)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("model", "seed"), CLEAR_CUT)
def test_generation(model: Callable[[], Any], seed: int, cache: str | None) -> None:
    assert_generates_eagers_tokens(model, seed, cache)


def test_compiled() -> None:
    """One graph: while traced, masks are laid out and nothing is read on the host."""
    eager = on("prefill", make(mistral, torch.bfloat16))
    mask = padded([19, 7], "left")
    inputs = {"input_ids": tokens(2, 19) * mask, "attention_mask": mask}
    compiled = torch.compile(eager, backend="eager", fullgraph=True)
    kept = mask.bool()
    assert torch.equal(result(compiled, **inputs)[kept], result(eager, **inputs)[kept])


def test_from_a_configuration() -> None:
    config = llama().config
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="prefill", dtype=torch.float16
    )
    assert_as_good_as_eager(model.eval(), input_ids=tokens(1, 5))


def test_attention_is_called_with_lengths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, windowed and padded: no mask, and no key of padding."""
    calls: list[dict[str, Any]] = []
    right = integration.single_prefill_with_kv_cache

    def watched(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        calls.append({"rows": q.shape[0], "keys": k.shape[1], **arguments})
        return right(q, k, v, **arguments)

    monkeypatch.setattr(integration, "single_prefill_with_kv_cache", watched)
    mask = padded([9, 4], "left")
    on("prefill", make(gemma2, torch.bfloat16))(input_ids=tokens(2, 9), attention_mask=mask)
    assert [(call["rows"], call["keys"]) for call in calls] == [(9, 9), (4, 4)] * 2
    assert [call["window_left"] for call in calls] == [3, 3, -1, -1]
    assert all(call["causal"] and call["custom_mask"] is None for call in calls)
    calls.clear()
    mask = padded([9, 4], "right")
    on("prefill", make(bert, torch.bfloat16))(input_ids=tokens(2, 9), attention_mask=mask)
    assert [(call["rows"], call["keys"]) for call in calls] == [(9, 9), (9, 4)] * 2
    assert all(not call["causal"] and call["custom_mask"] is None for call in calls)


def test_a_cache_longer_than_what_it_holds() -> None:
    """Keys past the last row are no part of the call, with a padding mask and without."""
    for padding in (None, torch.ones(1, 5, dtype=torch.bool)):
        mask = prefill_mask(1, 3, 10, q_offset=torch.tensor(2), attention_mask=padding)
        assert isinstance(mask, VisibleKeys)
        assert mask.requests == (((0, 3), (0, 5)),)
        assert mask.shape == (1, 1, 3, 10)


def test_rows_of_padding_are_zero() -> None:
    mask = prefill_mask(2, 5, 5, attention_mask=padded([5, 2], "left").bool())
    q = torch.randn(2, 4, 5, 16).half()
    out, weights = prefill_attention(torch.nn.Module(), q, q, q, mask)
    assert weights is None
    assert out.any(-1).any(-1).tolist() == [[True] * 5, [False] * 3 + [True] * 2]


def test_one_mask_for_the_batch() -> None:
    """Every request of it, whether the mask is ranges or laid out."""
    q = torch.randn(3, 4, 5, 16).half()
    mask = prefill_mask(1, 5, 5, attention_mask=padded([5, 4], "left")[1:].bool())
    assert isinstance(mask, VisibleKeys)
    out, _ = prefill_attention(torch.nn.Module(), q, q, q, mask)
    laid_out, _ = prefill_attention(torch.nn.Module(), q, q, q, mask.clone())
    torch.testing.assert_close(out[:, 1:], laid_out[:, 1:], rtol=0, atol=0)
    assert out[:, 1:].any(-1).any(-1).all()


def test_a_window_without_keys_is_laid_out() -> None:
    function = transformers.masking_utils.sliding_window_causal_mask_function(0)
    mask = prefill_mask(1, 5, 5, mask_function=function, local_size=0)
    assert not isinstance(mask, VisibleKeys)
    assert not mask.any()
    q = torch.randn(1, 4, 5, 16).half()
    out, _ = prefill_attention(torch.nn.Module(), q, q, q, mask)
    assert not out.any()


def test_a_request_of_padding_alone_is_zero() -> None:
    q = torch.randn(2, 4, 5, 16).half()
    for causal in (True, False):
        function = (
            transformers.masking_utils.causal_mask_function
            if causal
            else transformers.masking_utils.bidirectional_mask_function
        )
        padding = padded([5, 0], "right").bool()
        mask = prefill_mask(2, 5, 5, mask_function=function, attention_mask=padding)
        assert isinstance(mask, VisibleKeys)
        out, _ = prefill_attention(torch.nn.Module(), q, q, q, mask)
        assert not out[1].any()
        assert out[0].any()


class TestVisibleKeys:
    """A mask that is laid out when somebody reads it."""

    def make(self) -> tuple[Tensor, Tensor]:
        padding = padded([6, 4], "left").bool()
        mask = prefill_mask(2, 6, 6, attention_mask=padding)
        laid_out = torch.ones(6, 6, dtype=torch.bool).tril() & padding[:, None, None]
        return mask, laid_out

    def test_asking_for_its_shape_leaves_it_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mask, _ = self.make()
        assert isinstance(mask, VisibleKeys)
        monkeypatch.setattr(mask, "lay_out", lambda: pytest.fail("laid out"))
        assert mask.shape == (2, 1, 6, 6)
        assert len(mask.shape) == mask.ndim == mask.dim() == 4
        assert mask.dtype == torch.bool
        assert mask.device.type == "cpu"

    def test_what_else_happens_to_it_happens_to_the_mask(self) -> None:
        mask, laid_out = self.make()
        other = torch.rand(2, 1, 6, 6) < 0.5
        for read, expected in (
            (mask[:, :, 2:], laid_out[:, :, 2:]),
            (mask & other, laid_out & other),
            (torch.cat([other, mask]), torch.cat([other, laid_out])),
            (mask.clone(), laid_out),
        ):
            assert type(read) is Tensor
            assert torch.equal(read, expected)

    def test_a_model_that_cuts_it_gets_the_same_attention(self) -> None:
        mask, laid_out = self.make()
        q = torch.randn(2, 4, 6, 16).half()
        out, _ = prefill_attention(torch.nn.Module(), q, q, q, mask)
        cut, _ = prefill_attention(torch.nn.Module(), q, q, q, mask[..., :6])
        real = laid_out.any(-1)[:, 0]
        torch.testing.assert_close(cut[real], out[real], rtol=0, atol=0)


class TestRefusals:
    def test_training(self) -> None:
        model = on("prefill", make(llama, torch.bfloat16))
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="forward pass only"):
            model(input_ids=tokens(1, 5))
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.1
        with pytest.raises(NotImplementedError, match=r"dropout=0\.1"):
            model.train()(input_ids=tokens(1, 5))

    def test_float32(self) -> None:
        with pytest.raises(TypeError, match=r"LlamaAttention computes in torch\.float32"):
            on("prefill", make(llama, torch.float32))(input_ids=tokens(1, 5))

    @pytest.mark.parametrize("name", ["position_bias", "cu_seq_lens_q", "output_attentions"])
    def test_unknown_arguments(self, name: str) -> None:
        q = torch.zeros(1, 2, 3, 8).half()
        module = torch.nn.Module()
        with pytest.raises(NotImplementedError, match=f"Module passes {name}"):
            prefill_attention(module, q, q, q, None, **{name: torch.ones(1)})
        prefill_attention(module, q, q, q, None, **{name: None})

    def test_masks(self) -> None:
        q = torch.zeros(2, 2, 3, 8).half()
        module = torch.nn.Module()
        for mask, text in (
            (torch.ones(2, 2, 3, 3, dtype=torch.bool), "one mask for all heads"),
            (torch.ones(2, 3, dtype=torch.bool), "expected .batch or 1, 1, q_length"),
            (torch.ones(2, 1, 3, 2, dtype=torch.bool), r"\(2, 1, 3, 2\)"),
            (prefill_mask(2, 3, 4), r"\(2, 1, 3, 4\)"),
        ):
            with pytest.raises(ValueError, match=text):
                prefill_attention(module, q, q, q, mask)
        with pytest.raises(TypeError, match="no additive bias"):
            prefill_attention(module, q, q, q, torch.zeros(2, 1, 3, 3))

    def test_a_window_to_both_sides_without_a_mask(self) -> None:
        q = torch.zeros(1, 2, 3, 8).half()
        with pytest.raises(NotImplementedError, match="left bound alone"):
            prefill_attention(torch.nn.Module(), q, q, q, None, is_causal=False, sliding_window=2)

    @pytest.mark.parametrize("window", [0, -1])
    def test_a_window_without_keys(self, window: int) -> None:
        q = torch.zeros(1, 2, 3, 8).half()
        with pytest.raises(ValueError, match=f"sliding_window={window} leaves no key; expected 1"):
            prefill_attention(torch.nn.Module(), q, q, q, None, sliding_window=window)

    def test_backend(self) -> None:
        with pytest.raises(ValueError, match="backend='cutlass' is unknown"):
            register(backend="cutlass")
        register(backend="fa2")
        with pytest.raises(NotImplementedError, match="fa2 needs a CUDA device"):
            on("prefill", make(llama, torch.bfloat16))(input_ids=tokens(1, 5))


def test_an_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers.masking_utils, "sdpa_mask", lambda batch_size, cache_position: None
    )
    with pytest.raises(ImportError, match=r"older form, without q_offset; expected 5\.24"):
        register()


@pytest.mark.parametrize("length", [1, 3])
def test_without_a_mask_the_layer_decides(length: int) -> None:
    """As flash attention takes it: bottom-right causal, and the window."""
    q = torch.randn(1, 4, length, 16).half()
    k, v = torch.randn(2, 1, 2, 9, 16).half()
    module = torch.nn.Module()
    distance = torch.arange(9) - torch.arange(9 - length, 9)[:, None]
    seen = (distance <= 0) & (distance > -4)
    masked, _ = prefill_attention(module, q, k, v, seen[None, None])
    causal, _ = prefill_attention(module, q, k, v, None, sliding_window=4)
    torch.testing.assert_close(causal, masked, rtol=0, atol=0)
    module.is_causal = False
    full, _ = prefill_attention(module, q, k, v, None)
    everything = torch.ones(1, 1, length, 9, dtype=torch.bool)
    masked, _ = prefill_attention(module, q, k, v, everything)
    torch.testing.assert_close(full, masked, rtol=0, atol=0)
