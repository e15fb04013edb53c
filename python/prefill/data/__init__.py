"""Attention inputs of a real model, with a float64 reference; see README.md beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

_FILE = "smollm2_layer9.safetensors"
_DTYPES = {"F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class RealActivations:
    """One layer's attention inputs over 512 tokens, on the CPU; attention was causal."""

    q_pre: Tensor
    """float16 [192, 9, 64]: queries before the rotary embedding."""
    k_pre: Tensor
    """float16 [192, 3, 64]: keys before the rotary embedding."""
    q: Tensor
    """float16 [512, 9, 64]"""
    k: Tensor
    """float16 [512, 3, 64]"""
    v: Tensor
    """float16 [512, 3, 64]"""
    o_ref: Tensor
    """float32 [512, 9, 64]: the output, computed in float64 from the float16 q, k, v."""
    lse2_ref: Tensor
    """float32 [512, 9]: the base-2 LSE, computed likewise."""
    sm_scale: float
    rope_theta: float
    rope_scale: float
    metadata: Mapping[str, str]
    """The file's own description: model, prompt, how the values were captured."""


def load_real_activations() -> RealActivations:
    """Read the packaged activations; every call returns tensors of its own."""
    content = resources.files(__package__).joinpath(_FILE).read_bytes()
    tensors, metadata = _parse_safetensors(content)
    return RealActivations(
        **tensors,
        sm_scale=float(metadata["sm_scale"]),
        rope_theta=float(metadata["rope_theta"]),
        rope_scale=float(metadata["rope_scale"]),
        metadata=metadata,
    )


def _parse_safetensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and metadata of a safetensors file: header length, JSON header, values."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    values = bytearray(content[start:])
    tensors = {}
    for name, entry in header.items():
        dtype = _DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(
            values, dtype=dtype, offset=begin, count=(end - begin) // dtype.itemsize
        )
        # A tensor of its own, so that it is aligned and one of them does not keep all alive.
        tensors[name] = flat.clone().view(entry["shape"])
    return tensors, metadata
