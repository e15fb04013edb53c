"""Who runs a case: this package's backends, torch's SDPA, and other libraries where installed.

`contender` says what one is; each other module is a library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch.nn.attention import SDPBackend

from prefill.bench.contenders import cudnn, flash_attention
from prefill.bench.contenders.contender import Call, Contender, attempt
from prefill.bench.contenders.cudnn import CudnnFloat8
from prefill.bench.contenders.flash_attention import FlashAttention4
from prefill.bench.contenders.flashinfer import FlashInfer
from prefill.bench.contenders.ours import Ours
from prefill.bench.contenders.sdpa import Sdpa

__all__ = [
    "OPTIONAL",
    "OURS",
    "RATIOS",
    "Call",
    "Contender",
    "CudnnFloat8",
    "FlashAttention4",
    "FlashInfer",
    "Ours",
    "Sdpa",
    "attempt",
    "available",
]

OPTIONAL: dict[str, Callable[[], Contender]] = {
    flash_attention.MODULE: FlashAttention4,
    cudnn.MODULE: CudnnFloat8,
    "flashinfer": FlashInfer,
}
"""Contenders by the module that they need."""

OURS = ("fa3", "fa2")
RATIOS: dict[str, tuple[tuple[str, ...], str]] = {
    "ours/cudnn": (OURS, "cudnn"),
    "fa2/flash": (("fa2",), "flash"),
    "ours/flash4": (OURS, "flash4"),
    "ours/cudnn8": (OURS, "cudnn8"),
    "ours/flashinfer": (OURS, "flashinfer"),
}
"""Speed of the first contender named that ran, over that of the second."""


def available() -> dict[str, Contender]:
    """All contenders by name, in the order of the table; other libraries only where installed."""
    contenders: list[Contender] = [
        Ours("fa3"),
        Ours("fa2"),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("flash", SDPBackend.FLASH_ATTENTION),
        *(make() for module, make in OPTIONAL.items() if _installed(module)),
    ]
    return {contender.name: contender for contender in contenders}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that would hold it
        return False
