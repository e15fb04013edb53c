"""torch's own attention."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from prefill.bench.cases import Case, Inputs, Length
from prefill.bench.contenders.contender import Call
from prefill.bench.masks import alibi_bias, unpack, visible
from prefill.rope import alibi_slopes


class Sdpa:
    """`scaled_dot_product_attention` on one of its backends, on views of the same tensors.

    What it has no argument for but a mask can say, it gets as one: a window as bool, ALiBi as a
    bias, which torch then reads beside k and v. The mask is made once for all input sets of a case.
    """

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend
        self._mask_of: tuple[Mapping[str, Any], Tensor] | None = None

    def context(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = sdpa_kernel(self._backend)
        return context

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (inputs.q, inputs.k, inputs.v))
        arguments = inputs.arguments
        unknown = [name for name in arguments if name not in SDPA_CAUSAL | SDPA_BY_MASK]
        if arguments.get("pos_encoding_mode") == "ROPE_LLAMA":
            unknown.append("ROPE_LLAMA")
        if unknown:
            raise NotImplementedError(f"SDPA has no {', '.join(unknown)}")
        options: dict[str, Any] = {"scale": arguments.get("sm_scale")}
        if not SDPA_BY_MASK.isdisjoint(arguments):
            options["attn_mask"] = self._mask(case, inputs)
        elif arguments.get("causal"):
            options |= self._causal(case.length)
        if case.heads.qo != case.heads.kv:
            options["enable_gqa"] = True

        def call() -> Tensor:
            return scaled_dot_product_attention(q, k, v, **options)

        return call

    def as_nhd(self, out: Tensor) -> Tensor:
        return out[0].transpose(0, 1)

    def dtype(self, case: Case, inputs: Inputs) -> torch.dtype:
        return case.dtype

    def _causal(self, length: Length) -> dict[str, Any]:
        """The options for a causal mask that ends at the last key.

        `is_causal` begins at the first one. Flash has kernels for the other mask; for any other
        backend torch would write it out, as bool, in every call.
        """
        if length.qo == 1:
            return {}  # the last row sees every key
        if length.qo == length.kv:
            return {"is_causal": True}
        if self._backend != SDPBackend.FLASH_ATTENTION:
            raise NotImplementedError(f"SDPA's {self.name} aligns its causal mask to the first key")
        return {"attn_mask": causal_lower_right(*length)}

    def _mask(self, case: Case, inputs: Inputs) -> Tensor:
        if self._mask_of is None or self._mask_of[0] is not inputs.arguments:
            self._mask_of = None  # the one before need not outlive the making of this one
            self._mask_of = inputs.arguments, attn_mask(case, inputs)
        return self._mask_of[1]


SDPA_CAUSAL = frozenset({"causal", "sm_scale"})
SDPA_BY_MASK = frozenset({"custom_mask", "packed_custom_mask", "window_left", "pos_encoding_mode"})
MOST_BIAS_BYTES = 4_000_000_000


def attn_mask(case: Case, inputs: Inputs) -> Tensor:
    """What the arguments mean, as SDPA takes it: bool [qo_len, kv_len], or with ALiBi a bias."""
    arguments, device = inputs.arguments, inputs.q.device
    qo_len, kv_len = case.length
    alibi = arguments.get("pos_encoding_mode") == "ALIBI"
    size = case.heads.qo * qo_len * kv_len * case.dtype.itemsize
    if alibi and size > MOST_BIAS_BYTES:
        raise NotImplementedError(f"SDPA's bias for ALiBi would take {size / 1e9:.1f} GB")
    mask: Tensor | None = arguments.get("custom_mask")
    if "packed_custom_mask" in arguments:
        mask = unpack(arguments["packed_custom_mask"], qo_len, kv_len)
    causal = mask is None and arguments.get("causal", False)
    if mask is None or "window_left" in arguments:
        seen = visible(qo_len, kv_len, causal, arguments.get("window_left", -1), device)
        mask = seen if mask is None else mask & seen
    return alibi_bias(alibi_slopes(case.heads.qo, device), mask, case.dtype) if alibi else mask
