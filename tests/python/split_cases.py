"""Calls whose keys are split by force: cases that hold every two values of each other argument.

Beside a plain covering set there are two of calls that may pack query heads, which ALiBi and
scales of q per head rule out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from cases import BFLOAT16, E4M3, E5M2, FLOAT16, PLAIN, Case
from combinations import new_pairs
from prefill import ops
from prefill.request import make_request

NUM_SPLITS = (1, 2, 3, 5, 8, 13, 64)
Axes = Mapping[str, tuple[Any, ...]]

AXES: Axes = {
    "num_splits": NUM_SPLITS,
    "qo_len": (1, 2, 7, 16, 63, 64, 65, 129),
    "kv_len": (1, 65, 200, 1111, 4097),
    "group": (1, 2, 3, 4, 5, 7, 8, 16, 71, 128),
    "head_dims": ((64, 64), (128, 128), (192, 128), (256, 256), (80, 80)),
    "dtypes": (
        (FLOAT16, FLOAT16, FLOAT16),
        (BFLOAT16, BFLOAT16, BFLOAT16),
        (FLOAT16, E4M3, E5M2),
        (BFLOAT16, E5M2, E4M3),
        (E4M3, E4M3, E4M3),
        (E5M2, E4M3, E5M2),
    ),
    "o_dtype": ("default", "other 16 bits", "float32"),
    "mask": ("none", "causal", "bool", "packed", "packed, odd address"),
    "window_left": (-1, 0, 100, 1000),
    "soft_cap": (None, 30.0),
    "position": ("none", "ALiBi", "ALiBi, slopes", "RoPE"),
    "sinks": (False, True),
    "scale_q": ("none", "float", "per head"),
    "scale_k": ("none", "per head"),
    "scale_v": ("none", "per head"),
    "kv_layout": ("NHD", "HND"),
    "view": ("dense", "fused", "in a cache of heads first", "odd strides"),
    "out": ("new", "wide", "odd strides"),
    "lse": ("none", "new", "transposed"),
    "lse_base": ("2", "e"),
}
PACKING: Axes = {**AXES, "position": ("none", "RoPE"), "scale_q": ("none", "float")}
MANY_HEADS = 16
"""Groups from here on have one key head alone: the truth in float64 takes memory."""


class SplitCase(NamedTuple):
    """A call, and into how many parts its keys are split."""

    case: Case
    num_splits: int


@cache
def split_cases() -> tuple[SplitCase, ...]:
    """The same each time."""
    covers = (covering(AXES, 0), covering(PACKING, 1), covering(PACKING, 2))
    return tuple(_split_case(chosen) for cover in covers for chosen in cover)


def covering(axes: Axes, seed: int) -> list[dict[str, Any]]:
    """A value of each axis, so often that every two values of two axes meet; greedy."""
    draw = random.Random(seed)
    left = dict.fromkeys(
        frozenset(((one, x), (other, y)))
        for one, other in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[one], axes[other])
    )
    cover = []
    while left:
        chosen = dict(next(iter(left)))
        for name in draw.sample(list(axes), len(axes)):
            if name not in chosen:
                options = draw.sample(axes[name], len(axes[name]))
                chosen[name] = max(options, key=new_pairs(left, chosen, name))
        for pair in itertools.combinations(chosen.items(), 2):
            left.pop(frozenset(pair), None)
        cover.append(chosen)
    return cover


def _split_case(chosen: dict[str, Any]) -> SplitCase:
    values = dict(chosen)
    num_splits = values.pop("num_splits")
    kv_heads = 1 if values["group"] >= MANY_HEADS else 2
    return SplitCase(replace(PLAIN, **values, kv_heads=kv_heads), num_splits)


def split_attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str, num_splits: int, **arguments: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`single_prefill_with_kv_cache` with its keys in so many parts; 0 leaves that to the rule."""
    request = make_request(q, k, v, backend=backend, **arguments)
    out, lse = ops.run(backend, request, num_splits=num_splits)
    return out if lse is None else (out, lse)
