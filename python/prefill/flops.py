"""What `torch.utils.flop_counter.FlopCounterMode` counts for a call on fa2 or fa3.

Multiplications and additions of the two products, over the pairs of row and key that `causal` and
`window_left` leave. The counter gives shapes, not values: a pair that a custom mask hides counts.
Softmax, soft caps, rotations and the like count nothing, as in torch's own formulas. The reference
backend is plain torch: there the counter sees every product that it computes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch

COUNTER = "torch.utils.flop_counter"


def visible_pairs(qo_len: int, kv_len: int, window_left: int, window_right: int) -> int:
    """Pairs (i, j) with `pos(i) - window_left <= j <= pos(i) + window_right`; below 0 = no bound.

    `pos(i) = i + kv_len - qo_len`. Without a loop: lengths may be millions.
    """
    first = kv_len - qo_len
    seen = qo_len * kv_len
    if window_right >= 0:
        seen = _clamped_sum(first + window_right + 1, qo_len, kv_len)
    if window_left >= 0:
        seen -= _clamped_sum(first - window_left, qo_len, kv_len)
    return seen


def _clamped_sum(first: int, count: int, top: int) -> int:
    """The sum of min(max(x, 0), top) over the `count` integers from `first` on."""

    def below(end: int) -> int:
        rising = min(max(end, 0), top)  # x < rising counts x, the others below `end` count top
        return rising * (rising - 1) // 2 + max(end - top, 0) * top

    return below(first + count) - below(first)


def attention_flops(
    backend: str,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    out: Sequence[int],
    lse: Sequence[int] | None,
    scale_q: Sequence[int] | None,
    scale_k: Sequence[int] | None,
    scale_v: Sequence[int] | None,
    mask: Sequence[int] | None,
    alibi_slopes: Sequence[int] | None,
    sinks: Sequence[int] | None,
    window_left: int,
    window_right: int,
    *others: object,
    out_shape: object = None,
) -> int:
    """The formula of both ops: their arguments, with shapes in the place of tensors."""
    qo_len, heads, head_dim_qk = q
    kv_len, _, head_dim_vo = v
    pairs = visible_pairs(qo_len, kv_len, window_left, window_right)
    return 2 * heads * pairs * (head_dim_qk + head_dim_vo)


def register() -> None:
    """Tell torch's counter of both ops, which must be defined: now, or when it is imported.

    It imports triton, where that is installed: an import of this package must not wait for it.
    """
    if COUNTER in sys.modules:
        _tell(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _CounterFinder())


def _tell(counter: ModuleType) -> None:
    ops = torch.ops.prefill
    counter.register_flop_formula([ops.attention, ops.prepared_attention])(attention_flops)


class _Search(threading.local):
    """Whether this thread's finder is asking the others."""

    is_on = False


class _CounterFinder(MetaPathFinder):
    """Finds the counter's module as the other finders do, and tells it when it is loaded.

    It stays until then: who only looks for the module does not load it.
    """

    def __init__(self) -> None:
        self._search = _Search()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != COUNTER or self._search.is_on:
            return None
        self._search.is_on = True
        try:
            spec = find_spec(name)
        finally:
            self._search.is_on = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_tell(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _tell(module)

        spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec
