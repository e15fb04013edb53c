"""Objects that callers pass by mistake or on purpose, for any argument of a call.

None of them may do more than raise what the function documents; some are legal for some arguments.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

DOCUMENTED = (ValueError, TypeError, NotImplementedError)
"""What `single_prefill_with_kv_cache` may raise, but for CUDA's own errors."""

ARGUMENTS = (
    *("q", "k", "v", "scale_q", "scale_k", "scale_v", "o_dtype", "custom_mask"),
    *("packed_custom_mask", "causal", "kv_layout", "pos_encoding_mode", "use_fp16_qk_reduction"),
    *("sm_scale", "window_left", "logits_soft_cap", "rope_scale", "rope_theta", "backend"),
    *("return_lse", "k_scale", "v_scale", "out", "lse", "alibi_slopes", "sinks", "lse_base"),
)


class Spiteful:
    """Claims to be a number and is none."""

    def __float__(self) -> float:
        raise ValueError("no float")

    def __index__(self) -> int:
        raise TypeError("no int")


def _without_room(x: Tensor) -> Tensor:
    """As many elements as `x` on a storage that holds none: they all share one address."""
    return x.new_zeros(1).expand(x.numel()).view(-1)


def _storage_cut(x: Tensor, size: int) -> Tensor:
    """A tensor whose storage has become that many bytes."""
    x = x.clone()
    x.untyped_storage().resize_(size)
    return x


PLAIN: dict[str, Any] = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "2 ** 31": 2**31,
    "2 ** 63": 2**63,
    "-2 ** 63 - 1": -(2**63) - 1,
    "10 ** 400": 10**400,
    "0.5": 0.5,
    "-1e30": -1e30,
    "1e308": 1e308,
    "1e-320": 1e-320,
    "inf": math.inf,
    "nan": math.nan,
    "complex": 1j,
    "fraction": Fraction(1, 3),
    "decimal": decimal.Decimal("0.25"),
    "numpy float": np.float32(0.25),
    "numpy int": np.int64(3),
    "numpy array": np.ones((3, 4)),
    "numpy scalar array": np.array([0.5]),
    "empty word": "",
    "word": "NHD",
    "lower case": "alibi",
    "number as word": "2",
    "null byte": "fa3\0",
    "bytes": b"HND",
    "list": [1.0, 2.0],
    "empty list": [],
    "tuple": (3, 4, 5),
    "dictionary": {"causal": True},
    "object": object(),
    "spiteful": Spiteful(),
    "float64": torch.float64,
    "int8": torch.int8,
    "float32": torch.float32,
    "type": float,
}

# Of q: what is made has its device.
TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "q": lambda q: q,
    "q transposed": lambda q: q.transpose(0, 1),
    "q in two dimensions": lambda q: q.flatten(1),
    "q in four dimensions": lambda q: q[None],
    "no element": lambda q: q[:0],
    "no head": lambda q: q[:, :0],
    "no head dim": lambda q: q[..., :0],
    "odd head dim": lambda q: q[..., :7],
    "a head more": lambda q: torch.cat((q, q[:, :1]), 1),
    "wide": lambda q: q.new_zeros(*q.shape[:2], 264),
    "of float64": lambda q: q.double(),
    "of int8": lambda q: torch.zeros_like(q, dtype=torch.int8),
    "of bool": lambda q: torch.ones_like(q, dtype=torch.bool),
    "of complex numbers": lambda q: torch.zeros_like(q, dtype=torch.complex64),
    "no dimension": lambda q: torch.tensor(0.5, device=q.device),
    "one element": lambda q: torch.ones(1, device=q.device),
    "one element in three dimensions": lambda q: torch.ones(1, 1, 1, device=q.device),
    "a value per head, and one": lambda q: torch.ones(q.shape[1] + 1, device=q.device),
    "a value per head, float64": lambda q: torch.ones(q.shape[1], device=q.device).double(),
    "a value per head, elsewhere": lambda q: torch.ones(q.shape[1], device="meta"),
    "a value per head, stride 0": lambda q: torch.ones(1, device=q.device).expand(q.shape[1]),
    "NaN per head": lambda q: torch.full((q.shape[1],), math.nan, device=q.device),
    "meta": lambda q: torch.empty_like(q, device="meta"),
    "sparse": lambda q: q.float().to_sparse(),
    "a row too few": lambda q: torch.ones(q.shape[0] - 1, 5, dtype=torch.bool, device=q.device),
    "a bit": lambda q: torch.ones(1, 1, dtype=torch.bool, device=q.device).expand(q.shape[0], 3),
    "a byte": lambda q: torch.zeros(1, dtype=torch.uint8, device=q.device),
    "many bytes": lambda q: torch.zeros(1 << 16, dtype=torch.uint8, device=q.device),
    "elements at one address": lambda q: _without_room(q.float()),
    "results at one address": lambda q: q.new_zeros(1).expand(q.shape),
    "freed": lambda q: _storage_cut(q, 0),
    "freed value per head": lambda q: _storage_cut(torch.ones(q.shape[1], device=q.device), 0),
    "cut short": lambda q: _storage_cut(q, max(0, q.nbytes - q.element_size())),
    "wants a gradient": lambda q: q.float().detach().requires_grad_(),
}

WORDS = (*PLAIN, *TENSORS)


def garbage(word: str, q: Tensor) -> Any:
    """The object of that word."""
    return PLAIN[word] if word in PLAIN else TENSORS[word](q)
