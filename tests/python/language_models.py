"""Small models of transformers with random weights, held against themselves on "eager".

Right is eager attention in float32; how far 16 bits may be from it is what eager attention is off
by in 16 bits, on the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # attention is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=5))


def gemma2() -> Any:
    config = transformers.Gemma2Config(
        **GROUPED, sliding_window=4, attn_logit_softcapping=1.5, query_pre_attn_scalar=16
    )
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **GROUPED, sliding_window=6, num_local_experts=4, num_experts_per_tok=4, rope_scaling=None
    )
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("eager")  # takes every dtype on every device
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0, 1.0)
    return model


def bert() -> Any:
    config = transformers.BertConfig(**COMMON, max_position_embeddings=256)
    return transformers.BertModel(config, add_pooling_layer=False)


def modernbert() -> Any:
    config = transformers.ModernBertConfig(
        **COMMON, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    )
    return transformers.ModernBertModel(config)


DECODERS = (llama, mistral, gemma2, gpt_oss)
ENCODERS = (bert, modernbert)


def make(model: Callable[[], Any], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> Any:
    """The same weights on every device."""
    torch.manual_seed(seed)
    return model().to(device, dtype).eval()


def on(attention: str, model: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of the model on that attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    return other if dtype is None else other.to(dtype)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def padded(lengths: list[int], side: str) -> Tensor:
    """int64 [batch, longest], 0 = padding."""
    longest = max(lengths)
    rows = [[0] * (longest - n) + [1] * n for n in lengths]
    return torch.tensor(rows if side == "left" else [row[::-1] for row in rows])


def beside(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, tensors on the model's device."""
    return {
        name: given.to(model.device) if isinstance(given, Tensor) else given
        for name, given in inputs.items()
    }


def result(model: Any, **inputs: Any) -> Tensor:
    """Logits, or an encoder's last states: float32, on the CPU."""
    return model(**beside(model, inputs))[0].float().cpu()


def root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def assert_as_good_as_eager(model: Any, real: Tensor | None = None, **inputs: Any) -> None:
    """Off by at most twice what eager attention is off by, at rows that are no padding.

    That is for the worst result. Over all of them chance evens out, so the mean is held to less.
    """
    right = result(on("eager", model, torch.float32), **inputs)
    kept = torch.ones(right.shape[:2], dtype=torch.bool) if real is None else real.bool()
    eager = (result(on("eager", model), **inputs) - right)[kept]
    ours = (result(on("prefill", model), **inputs) - right)[kept]
    assert ours.abs().max() <= 2 * eager.abs().max(), (ours.abs().max(), eager.abs().max())
    means = root_mean_square(ours), root_mean_square(eager)
    assert means[0] <= 1.5 * means[1], means
    # Rounding is all that it is: the 16-bit errors are a small part of the results' own size.
    assert 2 * means[1] < 0.1 * root_mean_square(right[kept]), (means, right[kept].abs().max())


def assert_chunks_as_good_as_eager(model: Any, ids: Tensor, lengths: tuple[int, ...]) -> None:
    """Prefill in pieces: the last one's logits are those of the whole."""
    right = result(on("eager", model, torch.float32), input_ids=ids)
    allowed = 2 * (result(on("eager", model), input_ids=ids) - right).abs().max()
    ours, cache = on("prefill", model), None
    for piece in ids.split(lengths, 1):
        out = ours(input_ids=piece.to(model.device), cache=cache, use_cache=True)
        cache = out.cache
    last = right[:, -lengths[-1] :]
    assert (out.logits.float().cpu() - last).abs().max() <= allowed


def generate(model: Any, inputs: dict[str, Tensor], **how: Any) -> tuple[Tensor, Tensor]:
    """12 greedy tokens.

    Returns:
        Prompts with what was generated, int64 [batch, length], and the logits, float32 [batch, 12,
        vocabulary]; on the CPU.
    """
    out = model.generate(
        **beside(model, inputs),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
        **how,
    )
    return out.sequences.cpu(), torch.stack(out.logits, 1).float().cpu()


CLEAR_CUT = ((llama, 20), (mistral, 7), (gemma2, 9), (gpt_oss, 27))
"""Models and seeds with which no two tokens are nearly equal, as with most seeds some are."""


def assert_generates_eagers_tokens(
    model: Callable[[], Any], seed: int, cache: str | None, device: str = "cpu"
) -> None:
    """In float16. The tokens' lead over the second best is beyond what rounding moves."""
    generator = make(model, torch.float16, seed, device)
    mask = padded([11, 6], "left")
    inputs = {"input_ids": tokens(2, 11) * mask, "attention_mask": mask}
    how = {"cache_implementation": cache}
    right, logits = generate(on("eager", generator, torch.float32), inputs, **how)
    ours, our_logits = generate(on("prefill", generator), inputs, **how)
    assert torch.equal(ours, right)
    off = (our_logits - logits).abs().amax(-1)
    best, second = logits.topk(2).values.unbind(-1)
    assert (2 * off < best - second).all()
