"""Which keys the rows of a padded batch see, as ranges; a mask only for who wants one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Request(NamedTuple):
    """One request of a batch: rows and keys that are no padding, as half-open ranges."""

    rows: tuple[int, int]
    keys: tuple[int, int]


class VisibleKeys(Tensor):
    """A bool mask `[batch, 1, q_length, kv_length]` that is laid out only if somebody reads it.

    Attention that knows the class takes `requests`, `causal` and `window_left` instead: they mean
    what `single_prefill_with_kv_cache` means by them, for each request's own rows and keys. It is a
    tensor because model code hands masks on, asks for their shape, and now and then cuts or
    combines them; all but questions about its shape and kind happens to the mask laid out.
    """

    requests: tuple[Request, ...]
    causal: bool
    window_left: int
    lay_out: Callable[[], Tensor]
    """The mask itself, with every request's padding in it."""

    @staticmethod
    def make(
        requests: Sequence[Request],
        lengths: tuple[int, int],
        causal: bool,
        window_left: int,
        lay_out: Callable[[], Tensor],
        device: torch.device | str,
    ) -> VisibleKeys:
        """`lengths` are (q_length, kv_length) of the padded batch."""
        shape = (len(requests), 1, *lengths)
        mask = torch.empty((), dtype=torch.bool, device=device).expand(shape)
        visible = mask.as_subclass(VisibleKeys)
        visible.requests = tuple(requests)
        visible.causal = causal
        visible.window_left = window_left
        visible.lay_out = lay_out
        return visible

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _SHAPE_AND_KIND:
                args, named = tree_map_only(cls, lambda mask: mask.lay_out(), (args, named))
            return func(*args, **named)


_SHAPE_AND_KIND: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")
) | {Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__}
