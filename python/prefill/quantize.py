"""16- and 32-bit tensors to float8 with a multiplier per head, as attention takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from prefill import errors
from prefill.request import FP8_DTYPES, KV_LAYOUTS

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize_per_head(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, kv_layout: str = "NHD"
) -> tuple[Tensor, Tensor]:
    """Round q, k or v to float8, each head with a multiplier of its own.

    With `largest` the largest finite value of `dtype` (448 for e4m3fn, 57344 for e5m2):

        scale[h] = max(|x[:, h, :]|) / largest      (1 where the head holds nothing but zeros)
        tensor[i, h, d] = round(x[i, h, d] / scale[h]), never beyond +-largest

    so that `x ~= tensor * scale[h]`, to half a step of `dtype`: 2^-4 of the value for e4m3fn, 2^-3
    for e5m2, down to the subnormal ones, 2^-9 * scale[h] and 2^-16 * scale[h] apart. The pair is
    what `single_prefill_with_kv_cache` takes:

        q8, scale_q = prefill.quantize_per_head(q)
        k8, scale_k = prefill.quantize_per_head(k)
        v8, scale_v = prefill.quantize_per_head(v)
        out = prefill.single_prefill_with_kv_cache(q8, k8, v8, scale_q, scale_k, scale_v)

    Args:
        x: float16, bfloat16 or float32, any device and strides: [length, heads, head_dim], or
            [heads, length, head_dim] with kv_layout="HND".
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        kv_layout: "NHD" or "HND", as in the attention call; q is always "NHD".

    Returns:
        The tensor of `dtype`, of x's shape, and the scale, float32 [heads], both on x's device.

    Raises:
        ValueError: x has not three dimensions, or kv_layout is unknown.
        TypeError: A dtype or kind of object that is not taken.
        NotImplementedError: x requires grad in grad mode: rounding has no gradient.

    Notes:
        NaN and infinities all become NaN, which no later step can take for a number, and have no
        part in the scale: the other elements of their head are what they would be without them.
        Works under torch.compile and in CUDA graphs; no host synchronisation. An x to be rotated
        ("ROPE_LLAMA") should be rotated before: a rotated pair may be longer than either of its
        elements, by up to sqrt(2), and a float8 that is already at `largest` then saturates.
    """
    _check(x, dtype, kv_layout)
    head, others = (1, (0, 2)) if kv_layout == "NHD" else (0, (1, 2))
    heads = x.shape[head]
    if x.numel() == 0:
        return x.to(dtype), x.new_ones(heads, dtype=torch.float32)
    largest = torch.finfo(dtype).max
    # Of a smaller scale float32 would lose digits, or all of it.
    smallest = torch.finfo(torch.float32).tiny
    peak = x.nan_to_num(0.0, 0.0, 0.0).abs().amax(others, keepdim=True).to(torch.float32)
    # By a tensor: CUDA divides by a number by multiplying, which is a rounding off.
    fitting = (peak / torch.full_like(peak, largest)).clamp(min=smallest)
    scale = torch.where(peak > 0.0, fitting, 1.0)
    steps = (x.to(torch.float32) / scale).clamp(-largest, largest)
    return torch.where(x.isfinite(), steps, torch.nan).to(dtype), scale.view(heads)


def _check(x: Tensor, dtype: torch.dtype, kv_layout: str) -> None:
    if not isinstance(x, Tensor):
        raise errors.not_a_tensor(("x", x))
    if x.layout is not torch.strided:
        raise errors.not_strided(("x", x))
    if not isinstance(dtype, torch.dtype) or dtype not in FP8_DTYPES:
        raise errors.not_float8(dtype, FP8_DTYPES)
    if not isinstance(kv_layout, str) or kv_layout not in KV_LAYOUTS:
        raise errors.unknown_word("kv_layout", kv_layout, KV_LAYOUTS)
    if x.dim() != 3:
        raise errors.not_heads(x, kv_layout)
    if x.dtype not in SOURCE_DTYPES:
        raise errors.not_quantizable(x.dtype, SOURCE_DTYPES)
    if x.requires_grad and torch.is_grad_enabled():
        raise errors.no_gradient_of_rounding("x")
