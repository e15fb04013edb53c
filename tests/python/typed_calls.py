"""What a type checker makes of calls: `mypy --strict tests/python/typed_calls.py`, in CI.

Nothing here runs. CI checks it against the installed package, whose `py.typed` it so needs.
"""

from torch import Tensor
from typing_extensions import assert_type

import prefill
from prefill import single_prefill_with_kv_cache as attention


def results(q: Tensor, k: Tensor, v: Tensor, either: bool) -> None:
    assert_type(attention(q, k, v), Tensor)
    assert_type(attention(q, k, v, causal=True, return_lse=False), Tensor)
    assert_type(attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(q, k, v, return_lse=either), Tensor | tuple[Tensor, Tensor])
    with_lse = prefill.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert_type(with_lse, tuple[Tensor, Tensor])
    assert_type(prefill.explain(q, k, v).backend, str | None)
    assert_type(prefill.merge_state(*with_lse, *with_lse), tuple[Tensor, Tensor])


def refused(q: Tensor, k: Tensor, v: Tensor) -> None:
    """An unused "type: ignore" is an error too."""
    attention(q, k)  # type: ignore[call-overload]
    attention(q, k, v, lse_base="10")  # type: ignore[call-overload]
    attention(q, k, v, cuasal=True)  # type: ignore[call-overload]
