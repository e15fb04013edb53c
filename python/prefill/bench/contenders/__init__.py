"""Who runs a case: this package's backends, torch's SDPA, FlashInfer.

`contender` says what one is; each other module is a library.
"""

from __future__ import annotations

import importlib.util

from torch.nn.attention import SDPBackend

from prefill.bench.contenders.contender import Call, Contender, attempt
from prefill.bench.contenders.flashinfer import FlashInfer
from prefill.bench.contenders.ours import Ours
from prefill.bench.contenders.sdpa import Sdpa

__all__ = [
    "OURS",
    "RATIOS",
    "Call",
    "Contender",
    "FlashInfer",
    "Ours",
    "Sdpa",
    "attempt",
    "available",
]

OURS = ("fa3", "fa2")
RATIOS: dict[str, tuple[tuple[str, ...], str]] = {
    "ours/cudnn": (OURS, "cudnn"),
    "fa2/flash": (("fa2",), "flash"),
}
"""Speed of the first contender named that ran, over that of the second."""


def available() -> dict[str, Contender]:
    """All contenders by name, in the order of the table; FlashInfer only where installed."""
    contenders: list[Contender] = [
        Ours("fa3"),
        Ours("fa2"),
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("flash", SDPBackend.FLASH_ATTENTION),
    ]
    if importlib.util.find_spec("flashinfer") is not None:
        contenders.append(FlashInfer())
    return {contender.name: contender for contender in contenders}
