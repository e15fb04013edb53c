"""Merging of attention results over disjoint sets of keys.

A call over some of the keys gives an output and its log-sum-exp; together they are a *state*.
States over disjoint sets of keys merge to the state over all of them, in any grouping:

```
m   = max_i lse_i
w_i = base^(lse_i - m)
o   = sum_i w_i o_i / sum_i w_i
lse = m + log_base(sum_i w_i)
```

`base` is 2, this package's (and FlashInfer's) unit of LSE, or e. A state without keys (LSE -inf)
has weight 0 and its output is not read, so whatever it holds stays out of the result; if every
state is empty, so is the result: output 0, LSE -inf. An LSE of +inf outweighs all finite ones, and
NaN gives NaN. Values are computed in float32 (float64 if an input is float64), state after state in
the order given: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefill import errors


def merge_state(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, lse_base: str | int = "2"
) -> tuple[Tensor, Tensor]:
    """Merge two states: outputs `[len, heads, head_dim]`, LSEs `[len, heads]`.

    Returns the output in o_a's dtype and the LSE (float32, or float64 if an LSE is). `lse_base` is
    the unit of all LSEs, "2" (or 2) or "e". A sink that joined both partial calls would count
    twice: give `sinks` to one of them.
    """
    _check_state(o_a, lse_a, ("o_a", "lse_a"), "[len, heads, head_dim]", 3)
    _check_state(o_b, lse_b, ("o_b", "lse_b"), "[len, heads, head_dim]", 3)
    if o_a.shape != o_b.shape:
        raise ValueError(
            f"o_a and o_b must have one shape, got {tuple(o_a.shape)} and {tuple(o_b.shape)}; "
            "merge results of the same queries over different keys"
        )
    if o_a.dtype != o_b.dtype:
        raise TypeError(
            f"o_a and o_b must have one dtype, got {o_a.dtype} and {o_b.dtype}; cast one with "
            ".to(dtype)"
        )
    if o_a.device != o_b.device:
        raise ValueError(
            f"o_a and o_b must be on one device, got {o_a.device} and {o_b.device}; move one state "
            "with .to(device)"
        )
    return _merge([o_a, o_b], [lse_a, lse_b], _is_base_2(lse_base))


def merge_states(o: Tensor, lse: Tensor, *, lse_base: str | int = "2") -> tuple[Tensor, Tensor]:
    """Merge the states `o [len, num_states, heads, head_dim]`, `lse [len, num_states, heads]`.

    Returns the output `[len, heads, head_dim]` in o's dtype and the LSE `[len, heads]`, as
    `merge_state` does. No states at all give the empty state.
    """
    _check_state(o, lse, ("o", "lse"), "[len, num_states, heads, head_dim]", 4)
    base_2 = _is_base_2(lse_base)
    if o.shape[1] == 0:
        length, _, heads, head_dim = o.shape
        empty_lse = lse.new_full((length, heads), -torch.inf, dtype=_lse_dtype(lse))
        return o.new_zeros((length, heads, head_dim)), empty_lse
    return _merge(list(o.unbind(1)), list(lse.unbind(1)), base_2)


def _lse_dtype(*lses: Tensor) -> torch.dtype:
    return torch.float64 if any(lse.dtype == torch.float64 for lse in lses) else torch.float32


def _is_base_2(lse_base: object) -> bool:
    """Whether the unit is 2, not e; what else is refused as attention refuses it."""
    if isinstance(lse_base, str) and lse_base in ("2", "e"):
        return lse_base == "2"
    if type(lse_base) is int and lse_base == 2:
        return True
    raise errors.bad_lse_base(lse_base)


def _merge(outputs: list[Tensor], lses: list[Tensor], base_2: bool) -> tuple[Tensor, Tensor]:
    exp, log = (torch.exp2, torch.log2) if base_2 else (torch.exp, torch.log)
    lse_dtype = _lse_dtype(*lses)
    dtype = torch.float64 if outputs[0].dtype == torch.float64 else lse_dtype
    states = [lse.to(dtype) for lse in lses]
    peak = states[0]
    for lse in states[1:]:
        peak = torch.maximum(peak, lse)
    # An infinite peak cannot be subtracted: all states are empty (-inf), or those at +inf share the
    # weight.
    shift = torch.where(peak.isinf(), 0.0, peak)
    overflow = peak == torch.inf

    total = torch.zeros_like(peak)
    merged = torch.zeros(outputs[0].shape, dtype=dtype, device=outputs[0].device)
    for output, lse in zip(outputs, states, strict=True):
        at_peak = (lse == torch.inf).to(dtype)
        weight = torch.where(overflow, at_peak, exp(lse - shift))
        total = total + weight
        contribution = weight[..., None] * output.to(dtype)
        merged = merged + torch.where((weight == 0)[..., None], 0.0, contribution)
    empty = peak == -torch.inf
    result = torch.where(empty[..., None], 0.0, merged / total[..., None])
    return result.to(outputs[0].dtype), (shift + log(total)).where(~overflow, peak).to(lse_dtype)


def _check_state(o: Tensor, lse: Tensor, names: tuple[str, str], layout: str, dims: int) -> None:
    for name, tensor in zip(names, (o, lse), strict=True):
        if not isinstance(tensor, Tensor):
            raise errors.not_a_tensor((name, tensor))
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name} must be a floating-point tensor, got {tensor.dtype}; pass what attention "
                "returned, or convert it with .float()"
            )
    if o.dim() != dims:
        raise ValueError(
            f"{names[0]} must be {layout}, got shape {tuple(o.shape)}; two states go to "
            "merge_state, any number, stacked with torch.stack(..., dim=1), to merge_states"
        )
    if lse.shape != o.shape[:-1]:
        raise ValueError(
            f"{names[1]} must have {names[0]}'s shape without the last dimension, "
            f"{tuple(o.shape[:-1])}; got {tuple(lse.shape)}. Pass the LSE that came with that "
            "output; attention's is [len, heads]"
        )
    if lse.device != o.device:
        raise ValueError(
            f"{names[0]} and {names[1]} must be on one device, got {o.device} and {lse.device}; "
            "move one with .to(device)"
        )
