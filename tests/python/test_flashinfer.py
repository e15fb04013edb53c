"""This package behind FlashInfer's names: a module made here, and FlashInfer's own if installed."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import prefill
from fake_flashinfer import NAMES, fake_flashinfer, theirs
from naive import make_qkv
from prefill.compat import flashinfer as compat


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield fake_flashinfer(monkeypatch)
    compat.uninstall()


def functions(package: ModuleType) -> list[Any]:
    return [getattr(each, name) for each in (package, package.prefill) for name in NAMES]


def test_install_and_uninstall(flashinfer: ModuleType) -> None:
    before, other = functions(flashinfer), flashinfer.merge_state
    compat.install()
    q, k, v = make_qkv(5, 9, (4, 2), 16)
    expected = prefill.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    for module in (flashinfer, flashinfer.prefill):
        out = module.single_prefill_with_kv_cache(q, k, v, causal=True)
        assert torch.equal(out, expected[0])
        out, lse = module.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    compat.uninstall()
    assert functions(flashinfer) == before
    assert flashinfer.merge_state is other
    compat.uninstall()
    assert functions(flashinfer) == before


def test_as_a_context(flashinfer: ModuleType) -> None:
    before = functions(flashinfer)
    with compat.install():
        assert functions(flashinfer)[0] is compat.single_prefill_with_kv_cache
    assert functions(flashinfer) == before
    with pytest.raises(ZeroDivisionError), compat.install():
        raise ZeroDivisionError
    assert functions(flashinfer) == before


def test_installed_twice(flashinfer: ModuleType) -> None:
    before = functions(flashinfer)
    with compat.install():
        with compat.install():
            pass
        assert functions(flashinfer)[0] is compat.single_prefill_with_kv_cache
    assert functions(flashinfer) == before
    compat.install()
    compat.install()
    compat.uninstall()
    assert functions(flashinfer) == before


def test_what_is_undone_is_forgotten(flashinfer: ModuleType) -> None:
    outer = compat.install()
    with compat.install():
        pass
    assert compat._installations == [outer]
    outer.undo()
    outer.undo()
    assert compat._installations == []


def test_flashinfer_that_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own error says more than that it is not installed."""
    (tmp_path / "flashinfer.py").write_text("import a_package_that_flashinfer_needs")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'a_package_that_flashinfer_"):
        compat.install()
    (tmp_path / "flashinfer.py").write_text("from flashinfer import nothing")
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        compat.install()


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match="not installed; call prefill"):
        compat.install()


def test_without_its_prefill_nothing_is_replaced(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", None)
    with pytest.raises(ImportError):
        compat.install()
    assert flashinfer.single_prefill_with_kv_cache is theirs


def test_every_argument_by_position_reaches_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FlashInfer's order, in which kv_cache_sf, k_scale and v_scale follow return_lse."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(compat, "attention", lambda *args, **kwargs: seen.append((args, kwargs)))
    given = [object() for _ in range(20)]
    k_scale, v_scale, sinks = object(), object(), object()
    compat.single_prefill_with_kv_cache(*given, None, k_scale, v_scale, sinks=sinks)
    ((args, kwargs),) = seen
    assert list(args) == given
    assert kwargs == {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}


def test_too_much_is_refused() -> None:
    with pytest.raises(TypeError, match="at most 23 arguments are taken by position, 24 were"):
        compat.single_prefill_with_kv_cache(*[None] * 24)
    with pytest.raises(TypeError, match="k_scale given by position and by keyword"):
        compat.single_prefill_with_kv_cache(*[None] * 22, k_scale=2.0)


def test_scales_by_position() -> None:
    q, k, v = make_qkv(5, 9, (4, 2), 16)
    positional = [None] * 6 + [False, "NHD", "NONE", False, None, -1, None, None, None]
    out = compat.single_prefill_with_kv_cache(
        q, k, v, *positional, "reference", False, None, 0.5, 2.0
    )
    expected = prefill.single_prefill_with_kv_cache(q, k, v, k_scale=0.5, v_scale=2.0)
    assert torch.equal(out, expected)


def test_what_differs_is_refused() -> None:
    q, k, v = make_qkv(5, 9, (4, 2), 16)
    with pytest.raises(NotImplementedError, match="no NVFP4"):
        compat.single_prefill_with_kv_cache(q, k, v, kv_cache_sf=(k, v))
    with pytest.raises(ValueError, match="backend='cudnn' is unknown"):
        compat.single_prefill_with_kv_cache(q, k, v, backend="cudnn")
    with pytest.raises(NotImplementedError, match="backend='reference' can"):
        compat.single_prefill_with_kv_cache(q, k, v, backend="fa3")
    with pytest.raises(ValueError, match="would have no effect"):
        compat.single_prefill_with_kv_cache(q, k, v, rope_theta=1e4)


def test_with_flashinfers_own_package() -> None:
    """One order, one set of defaults; a call in FlashInfer's words goes through."""
    flashinfer = pytest.importorskip("flashinfer")
    theirs = inspect.signature(flashinfer.single_prefill_with_kv_cache).parameters
    ours = inspect.signature(prefill.single_prefill_with_kv_cache).parameters
    shared = [
        name for name, each in ours.items() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    newer = list(theirs)[len(shared) :]
    assert list(theirs) == [*shared, *newer]
    assert newer == ["kv_cache_sf", "k_scale", "v_scale"][: len(newer)]
    assert all(theirs[name].default == ours[name].default for name in shared)
    q, k, v = make_qkv(5, 9, (4, 2), 16)
    before = functions(flashinfer)
    with compat.install():
        in_order = {name: each.default for name, each in theirs.items()} | {"causal": True}
        out = flashinfer.single_prefill_with_kv_cache(q, k, v, *list(in_order.values())[3:])
        with_lse = flashinfer.prefill.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert functions(flashinfer) == before
    expected = prefill.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(with_lse[0], expected[0])
    assert torch.equal(with_lse[1], expected[1])
