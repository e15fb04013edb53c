"""A package with FlashInfer's functions where FlashInfer has them."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest

NAMES = ("single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse")


def theirs(*args: Any, return_lse: bool = False, **kwargs: Any) -> str:
    return f"FlashInfer, {return_lse}"


def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Install it for the test; its `merge_state` is one of the names that stay."""
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.prefill")
    package.__path__ = []
    for each in (package, module):
        setattr(each, NAMES[0], theirs)
        setattr(each, NAMES[1], functools.partial(theirs, return_lse=True))
    package.prefill = module  # type: ignore[attr-defined]
    package.merge_state = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    return package
