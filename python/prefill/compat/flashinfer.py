"""This package behind FlashInfer's names: `install()`, and what calls FlashInfer calls this.

    with prefill.compat.flashinfer.install():
        flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)

docs/flashinfer.md lists what differs. `from flashinfer import single_prefill_with_kv_cache` binds
the function that is there at that moment: install before such imports run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType, TracebackType
from typing import Any

from torch import Tensor

from prefill.api import single_prefill_with_kv_cache as attention

_NAME = "single_prefill_with_kv_cache"
_WITH_LSE = "single_prefill_with_kv_cache_return_lse"
_MODULES = ("flashinfer", "flashinfer.prefill")
_NEWER = ("kv_cache_sf", "k_scale", "v_scale")
_SHARED = sum(
    parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in inspect.signature(attention).parameters.values()
)
"""How many arguments both have by position, in one order."""


def single_prefill_with_kv_cache(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill.single_prefill_with_kv_cache` in the order of FlashInfer's newest arguments.

    FlashInfer takes `kv_cache_sf`, `k_scale` and `v_scale` by position too, after the arguments
    that both have. This package's own keywords (`sinks`, `out`, ...) are taken as well, for code
    that is on its way over.

    Raises:
        NotImplementedError: `kv_cache_sf`: there is no NVFP4 cache here. And whatever
            `prefill.single_prefill_with_kv_cache` raises.
    """
    shared, newer = args[:_SHARED], args[_SHARED:]
    if len(newer) > len(_NEWER):
        most = _SHARED + len(_NEWER)
        raise TypeError(f"at most {most} arguments are taken by position, {len(args)} were given")
    kwargs = {"kv_cache_sf": None} | kwargs
    by_position = dict(zip(_NEWER, newer, strict=False))
    twice = [name for name in by_position if kwargs.get(name) is not None]
    if twice:
        raise TypeError(f"{', '.join(twice)} given by position and by keyword")
    kwargs |= by_position
    if kwargs.pop("kv_cache_sf") is not None:
        raise NotImplementedError(
            "kv_cache_sf is given, and prefill has no NVFP4 key/value cache; expected None with "
            "float16, bfloat16 or float8 k and v. uninstall() brings FlashInfer's function back."
        )
    result: Tensor | tuple[Tensor, Tensor] = attention(*shared, **kwargs)
    return result


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)


class Installation:
    """What one `install()` replaced; leaving it as a context puts that back."""

    def __init__(self, replaced: list[tuple[ModuleType, str, Any]]) -> None:
        self._replaced = replaced

    def undo(self) -> None:
        """Put FlashInfer's functions back; nothing where that has been done."""
        for module, name, original in self._replaced:
            setattr(module, name, original)
        self._replaced.clear()
        if self in _installations:
            _installations.remove(self)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


_installations: list[Installation] = []


def install() -> Installation:
    """Put this package's functions in the place of FlashInfer's, in `flashinfer` and its `prefill`.

    Those are `single_prefill_with_kv_cache` and `single_prefill_with_kv_cache_return_lse`; all else
    of FlashInfer stays. A second `install()` finds nothing to replace, and leaving it as a context
    puts nothing back. For the whole process; not to be raced by threads.

    Raises:
        ImportError: FlashInfer is not installed; or its own, where importing it fails.
    """
    replaced = []
    ours = {
        _NAME: single_prefill_with_kv_cache,
        _WITH_LSE: single_prefill_with_kv_cache_return_lse,
    }
    for module_name in _MODULES:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != "flashinfer":  # it is there, and something that it needs is not
                raise
            raise ImportError(
                "prefill.compat.flashinfer.install() replaces functions of FlashInfer, which is "
                "not installed; call prefill.single_prefill_with_kv_cache, or pip install "
                "flashinfer-python."
            ) from error
        replaced += [
            (module, name, getattr(module, name))
            for name, function in ours.items()
            if getattr(module, name) is not function
        ]
    for module, name, _ in replaced:
        setattr(module, name, ours[name])
    installation = Installation(replaced)
    _installations.append(installation)
    return installation


def uninstall() -> None:
    """Undo every `install()`; nothing where there was none."""
    while _installations:
        _installations[-1].undo()
