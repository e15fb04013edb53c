"""This package's attention for Hugging Face diffusers.

    from prefill.integrations.diffusers import register

    register()
    pipe.transformer.set_attention_backend("prefill")

Each clip or image of a batch is one call of `single_prefill_with_kv_cache`. Masks are bool ones, of
keys or of pairs, and are read where they lie: no value of theirs is looked at on the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from prefill.api import single_prefill_with_kv_cache
from prefill.request import BACKENDS, HALF_DTYPES

NAME = "prefill"
_INSTEAD = "another backend, such as set_attention_backend('native')"


def register(backend: str = "auto") -> str:
    """Add the attention backend "prefill" to diffusers.

    Then `model.set_attention_backend("prefill")` takes it, and `attention_backend("prefill")`, a
    context. Call it again to change `backend`, which every call gets, for all models.

    Returns:
        The name, "prefill".

    Raises:
        ImportError: diffusers is missing, or has another dispatch than this is written for.
        ValueError: An unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; expected one of {', '.join(BACKENDS)}.")
    try:
        from diffusers.models.attention_dispatch import (
            AttentionBackendName,
            _AttentionBackendRegistry,
        )
    except ImportError as error:
        raise ImportError(
            "prefill.integrations.diffusers needs diffusers with an attention dispatch: pip "
            "install 'prefill[diffusers]'."
        ) from error
    _add_name(AttentionBackendName)
    member = AttentionBackendName(NAME)

    # Diffusers passes on what the function's own signature names.
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return call(
            query, key, value, attn_mask, dropout_p, is_causal, scale, return_lse, _parallel_config
        )

    call = partial(prefill_attention, backend=backend)
    _AttentionBackendRegistry.register(member)(attention)
    return NAME


def _add_name(names: Any) -> None:
    """Give the closed Enum of backends one member more, as its own class body would."""
    if NAME in names._value2member_map_:
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    parallel_config: Any = None,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in the form of diffusers' dispatch.

    Args:
        query: [batch, q_length, num_qo_heads, head_dim_qk], float16 or bfloat16.
        key: [batch, kv_length, num_kv_heads, head_dim_qk]; fewer heads than the query's need no
            `enable_gqa`.
        value: [batch, kv_length, num_kv_heads, head_dim_vo].
        attn_mask: bool, True = keep: keys [batch, kv_length], or pairs [batch or 1, 1, q_length or
            1, kv_length], one for all heads.
        dropout_p: 0: this is a forward pass only.
        is_causal: For as many queries as keys, without a mask.
        scale: Of the logits; default 1 / sqrt(head_dim_qk).
        return_lse: Also return the LSE.
        parallel_config: None: diffusers' context parallelism is not served.
        backend: As for `single_prefill_with_kv_cache`.

    Returns:
        The output [batch, q_length, num_qo_heads, head_dim_vo]; with return_lse a pair of it and
        the natural LSE, float32 [batch, q_length, num_qo_heads], as diffusers' other backends give.

    Raises:
        NotImplementedError: Training (dropout, or gradients), or context parallelism.
        TypeError: Tensors of float32, or a mask that is not bool.
        ValueError: A mask of another shape, or `is_causal` where torch's meaning is another.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p={dropout_p}: {NAME!r} attention is a forward pass only. Call model.eval()."
        )
    if parallel_config is not None:
        raise NotImplementedError(
            f"{NAME!r} attention does not serve diffusers' context parallelism. Use {_INSTEAD}; "
            "examples/context_parallel.py shows this package's way."
        )
    if query.dtype not in HALF_DTYPES:
        raise TypeError(
            f"the model computes in {query.dtype}; {NAME!r} attention takes torch.float16 and "
            "torch.bfloat16. Load the model with torch_dtype=torch.bfloat16."
        )
    batch, q_length, heads, _ = query.shape
    kv_length = key.shape[1]
    if is_causal and (attn_mask is not None or q_length != kv_length):
        raise ValueError(
            f"is_causal=True with {q_length} queries, {kv_length} keys and "
            f"{'a' if attn_mask is not None else 'no'} mask; expected as many queries as keys and "
            f"no mask: torch aligns the triangle at the first key, this package at the last. Use "
            f"{_INSTEAD}."
        )
    masks = [None] * batch if attn_mask is None else _masks(attn_mask, batch, q_length, kv_length)
    out = query.new_empty((batch, q_length, heads, value.shape[-1]))
    size = (batch, q_length, heads)
    lse = torch.empty(size, dtype=torch.float32, device=query.device) if return_lse else None
    for number in range(batch):
        single_prefill_with_kv_cache(
            query[number],
            key[number],
            value[number],
            custom_mask=masks[number],
            causal=is_causal,
            sm_scale=scale,
            backend=backend,
            return_lse=return_lse,
            lse_base="e",
            out=out[number],
            lse=None if lse is None else lse[number],
        )
    return out if lse is None else (out, lse)


def _masks(mask: Tensor, batch: int, q_length: int, kv_length: int) -> list[Tensor | None]:
    """A view bool [q_length, kv_length] of it for each member of the batch."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}; {NAME!r} attention takes bool masks, True = keep, "
            f"and has no additive bias. Pass mask == 0 if it holds 0 and -inf alone, or use "
            f"{_INSTEAD}."
        )
    shape = tuple(mask.shape)
    if shape == (batch, kv_length):
        mask = mask[:, None, None]
    elif not (
        len(shape) == 4
        and shape[0] in (1, batch)
        and shape[1] == 1
        and shape[2] in (1, q_length)
        and shape[3] == kv_length
    ):
        raise ValueError(
            f"attn_mask has shape {shape}; expected [batch, kv_length] = {(batch, kv_length)} or "
            f"[batch or 1, 1, q_length or 1, kv_length] = {(batch, 1, q_length, kv_length)}: one "
            f"mask for all heads. Use {_INSTEAD} for others."
        )
    return list(mask.expand(batch, 1, q_length, kv_length)[:, 0])
