"""This package's attention for Hugging Face transformers.

    from prefill.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="prefill")

Each request of a batch is one call of `single_prefill_with_kv_cache`, on the keys that are no
padding. Grouped heads, windows, soft caps and sinks come from the model; a bool mask is used only
where a model wants what causal, window and padding cannot say. Results at rows of padding are 0
under causal attention, as those of flash attention are.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prefill.api import single_prefill_with_kv_cache
from prefill.integrations.visible_keys import Request, VisibleKeys
from prefill.request import BACKENDS, HALF_DTYPES

NAME = "prefill"
# What models hand down that has no say in attention, or none that is not in the tensors already.
_NO_PART_IN_ATTENTION = frozenset(
    {
        "cache_position",
        "deterministic",  # always
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",  # the model has rotated q and k
        "return_dict",
        "use_cache",
    }
)


def register(backend: str = "auto") -> str:
    """Register the attention implementation "prefill" with transformers, and its masks.

    Call it before a model with `attn_implementation="prefill"` is made; again to change `backend`,
    which every call gets, for all models.

    Returns:
        The name, "prefill".

    Raises:
        ImportError: transformers is missing, or older than the mask functions this is written for.
        ValueError: An unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; expected one of {', '.join(BACKENDS)}.")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "prefill.integrations.transformers needs transformers with AttentionInterface and "
            "AttentionMaskInterface: pip install 'prefill[transformers]'."
        ) from error
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            f"transformers {__version__} describes masks in an older form, without q_offset; "
            "expected 5.24 or later: pip install --upgrade 'prefill[transformers]'."
        )
    from prefill.integrations.transformers_masks import prefill_mask

    AttentionInterface.register(NAME, partial(prefill_attention, backend=backend))
    AttentionMaskInterface.register(NAME, prefill_mask)
    return NAME


def prefill_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    backend: str = "auto",
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form of transformers' attention functions.

    Args:
        module: The layer; `module.is_causal` counts where there is no mask.
        query: [batch, num_qo_heads, q_length, head_dim_qk], float16 or bfloat16.
        key: [batch, num_kv_heads, kv_length, head_dim_qk].
        value: [batch, num_kv_heads, kv_length, head_dim_vo].
        attention_mask: What `prefill_mask` made; or bool [batch or 1, 1, q_length, at least
            kv_length], True = keep; or None: causal (bottom-right) or full, with the window.
        dropout: 0: this is a forward pass only.
        scaling: Of the logits; default 1 / sqrt(head_dim_qk).
        is_causal: Without a mask: instead of the layer's own.
        sliding_window: Without a mask: of a row and the keys before it, how many are seen. A mask
            has the window in it.
        softcap: The logits' soft cap.
        s_aux: [num_qo_heads]: the heads' sinks.
        backend: As for `single_prefill_with_kv_cache`.
        others: Names without a part in attention; any other is refused unless None or False.

    Returns:
        The output [batch, q_length, num_qo_heads, head_dim_vo]; and None, no weights.

    Raises:
        NotImplementedError: Training (dropout, or gradients), or an argument not known here.
        TypeError: Tensors of float32, or a mask that is not bool.
        ValueError: A mask of another shape than the tensors', or a window of no key.
    """
    if dropout:
        raise NotImplementedError(
            f"dropout={dropout}: {NAME!r} attention is a forward pass only. Call model.eval(), or "
            "train with attn_implementation='sdpa'."
        )
    unknown = [
        name
        for name, given in others.items()
        if name not in _NO_PART_IN_ATTENTION and given is not None and given is not False
    ]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))}, which {NAME!r} "
            "attention does not have. Leave it out, or use attn_implementation='eager'."
        )
    if query.dtype not in HALF_DTYPES:
        raise TypeError(
            f"{type(module).__name__} computes in {query.dtype}; {NAME!r} attention takes "
            "torch.float16 and torch.bfloat16. Load the model with dtype=torch.bfloat16."
        )
    arguments: dict[str, Any] = {
        "kv_layout": "HND",
        "sm_scale": scaling,
        "logits_soft_cap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
        "backend": backend,
    }
    batch, heads, q_length, _ = query.shape
    kv_length = key.shape[2]
    requests = [Request((0, q_length), (0, kv_length))] * batch
    masks: list[Tensor | None] = [None] * batch
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        arguments |= {"causal": causal, "window_left": _window_left(sliding_window, causal)}
    else:
        _check_mask(attention_mask, (batch, 1, q_length, kv_length))
        if isinstance(attention_mask, VisibleKeys):
            requests = list(attention_mask.requests)
            if len(requests) == 1:
                requests *= batch
            causal, window_left = attention_mask.causal, attention_mask.window_left
            arguments |= {"causal": causal, "window_left": window_left}
        else:
            masks = list(attention_mask.expand(batch, -1, -1, -1)[:, 0, :, :kv_length])

    # Calls write their own rows; those of padding are in none.
    covered = all(rows == (0, q_length) for rows, _ in requests)
    new = query.new_empty if covered else query.new_zeros
    out = new((batch, q_length, heads, value.shape[-1]))
    for number, ((row, row_end), (first, last)) in enumerate(requests):
        single_prefill_with_kv_cache(
            query[number, :, row:row_end].transpose(0, 1),
            key[number, :, first:last],
            value[number, :, first:last],
            custom_mask=masks[number],
            out=out[number, row:row_end],
            **arguments,
        )
    return out, None


def _window_left(sliding_window: int | None, causal: bool) -> int:
    if sliding_window is None:
        return -1
    if sliding_window < 1:
        raise ValueError(
            f"sliding_window={sliding_window} leaves no key; expected 1 or more, or None for no "
            "window."
        )
    if not causal:
        raise NotImplementedError(
            f"sliding_window={sliding_window} to both sides without a mask: {NAME!r} attention has "
            "a left bound alone. Let the model make its mask with create_*_mask."
        )
    return sliding_window - 1


def _check_mask(mask: Tensor, expected: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask has dtype {mask.dtype}; {NAME!r} attention takes bool masks, True = "
            "keep, and has no additive bias. Pass mask == 0, or use attn_implementation='eager'."
        )
    batch, heads, q_length, kv_length = expected
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1:3] == (heads, q_length)
    # Masks for a cache of fixed size may be longer than its keys; ranges count in these keys.
    exact = isinstance(mask, VisibleKeys)
    if not fits or (shape[3] != kv_length if exact else shape[3] < kv_length):
        raise ValueError(
            f"attention_mask has shape {shape}; expected [batch or 1, 1, q_length, kv_length] = "
            f"{expected}: one mask for all heads. Use attn_implementation='eager' for others."
        )
