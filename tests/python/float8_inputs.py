"""Quantised q, k and v, on which float8 kernels are held against `float8_scheme`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from exactness import expect, normal, visible
from float8_scheme import KEYS, Product, attend
from prefill import quantize_per_head
from prefill.data import load_real_activations

OUTLIERS, FACTOR = 0.01, 20.0


class Inputs(NamedTuple):
    """float8 tensors, NHD, and the scales of their heads."""

    tensors: tuple[Tensor, Tensor, Tensor]
    scales: dict[str, Tensor]


def drawn(
    lengths: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    outliers: float = 0.0,
) -> Inputs:
    """Normal numbers for 4 heads over 2, of which a share is `FACTOR` times as large."""
    shapes = ((lengths[0], 4, head_dims[0]), (lengths[1], 2, head_dims[0]))
    shapes = (*shapes, (lengths[1], 2, head_dims[1]))
    made = []
    for seed, shape in enumerate(shapes):
        x = normal(*shape, dtype=torch.float32, seed=seed, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        large = torch.rand(shape, generator=generator, device=device) < outliers
        made.append(torch.where(large, FACTOR * x, x))
    return quantised(*made, dtype=dtype)


def real(dtype: torch.dtype, device: str) -> Inputs:
    """What a language model's layer has: head dims of 64, with zeros to 80, which no one widens."""
    data = load_real_activations()
    wide = (pad(x.to(device), (0, 80 - x.shape[-1])) for x in (data.q, data.k, data.v))
    return quantised(*wide, dtype=dtype)


def quantised(*tensors: Tensor, dtype: torch.dtype) -> Inputs:
    pairs = [quantize_per_head(x, dtype) for x in tensors]
    (q, k, v), scales = zip(*pairs, strict=True)
    return Inputs((q, k, v), dict(zip(("scale_q", "scale_k", "scale_v"), scales, strict=True)))


def emulated(
    inputs: Inputs,
    causal: bool,
    o_dtype: torch.dtype,
    keys_of_tile: int = KEYS,
    product: Product = torch.matmul,
) -> Tensor:
    """The scheme's own output, [rows, heads, head_dim]."""
    q, k, v = (x.float().transpose(0, 1) for x in inputs.tensors)
    group = q.shape[0] // k.shape[0]
    scale_q, scale_k, scale_v = (x[:, None, None] for x in inputs.scales.values())
    k, v, scale_k, scale_v = (x.repeat_interleave(group, 0) for x in (k, v, scale_k, scale_v))
    logits = product(q, k.mT) * (q.shape[-1] ** -0.5 * scale_q * scale_k)
    seen = visible(q.shape[1], k.shape[1], causal, -1, q.device)
    logits = logits.masked_fill(~seen, -math.inf)
    no_sink = torch.full_like(logits[..., :1], -math.inf)
    out = attend(logits, v, no_sink, keys_of_tile, product) * scale_v
    return out.nan_to_num(0.0).transpose(0, 1).to(o_dtype)


class Errors(NamedTuple):
    """Against float64 on the same float8 values."""

    rms: float
    largest: float

    @classmethod
    def of(cls, out: Tensor, truth: Tensor) -> Errors:
        error = out.double() - truth
        return cls(error.square().mean().sqrt().item(), error.abs().amax().item())


def errors(
    inputs: Inputs,
    run: Callable[..., Tensor],
    causal: bool,
    o_dtype: torch.dtype,
    keys_of_tile: int = KEYS,
    product: Product = torch.matmul,
) -> tuple[Errors, Errors]:
    """Those of `run`, and of the scheme."""
    arguments: dict[str, Any] = {**inputs.scales, "causal": causal, "o_dtype": o_dtype}
    truth = expect(*inputs.tensors, **arguments).out
    ours = Errors.of(run(*inputs.tensors, **arguments), truth)
    scheme = emulated(inputs, causal, o_dtype, keys_of_tile, product)
    return ours, Errors.of(scheme, truth)
