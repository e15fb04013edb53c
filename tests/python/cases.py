"""One call as a list of choices, the tensors of it, and whether a backend's result is right.

`combinations` makes sets of cases; here is what a case means. Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exactness import Ledger, expect, normal
from float8_scheme import is_native
from layouts import Guarded, amid_nan, relaid
from prefill import explain, packbits, single_prefill_with_kv_cache
from prefill.request import FP8_DTYPES

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
E4M3, E5M2 = FP8_DTYPES

VALUES: dict[str, tuple[Any, ...]] = {
    "dtypes": (
        (FLOAT16, FLOAT16, FLOAT16),
        (BFLOAT16, BFLOAT16, BFLOAT16),
        (FLOAT16, E4M3, E4M3),
        (FLOAT16, E5M2, E4M3),
        (BFLOAT16, E4M3, E5M2),
        (BFLOAT16, E5M2, E5M2),
        (E4M3, E4M3, E4M3),
        (E5M2, E5M2, E5M2),
    ),
    "head_dims": (
        (64, 64),
        (128, 128),
        (192, 128),
        (256, 256),
        (72, 72),
        (80, 80),
        (96, 64),
        (112, 112),
    ),
    "group": (1, 3, 4, 8),
    "kv_layout": ("NHD", "HND"),
    "view": (
        "dense",
        "fused",
        "in a cache of heads first",
        "wide heads",
        "odd strides",
        "odd address",
    ),
    "qo_len": (17, 1, 130, 257),
    "kv_len": (63, 1, 300, 1025),
    "mask": (
        "none",
        "causal",
        "bool",
        "packed",
        "bool, rows apart",
        "bool, columns apart",
        "packed, odd address",
        "packed, bytes apart",
    ),
    "window_left": (-1, 0, 7, 200),
    "soft_cap": (None, 0.5, 30.0),
    "position": ("none", "ALiBi", "ALiBi, slopes", "RoPE", "RoPE, scaled"),
    "sinks": (False, True),
    "sm_scale": (None, -0.2, 0.0, 3.0),
    "scale_q": ("none", "float", "per head", "element"),
    "scale_k": ("none", "float", "per head", "element"),
    "scale_v": ("none", "float", "per head", "element"),
    "k_scale": ("none", "float", "element"),
    "v_scale": ("none", "float", "element"),
    "fp16_reduction": (False, True),
    "o_dtype": ("default", "same", "other 16 bits", "float32"),
    "lse_base": ("2", "e"),
    "out": ("new", "rows", "wide", "odd strides"),
    "lse": ("none", "new", "rows", "transposed"),
    "nan_key": (False, True),
}
"""What each argument may be; the plainest value first."""


@dataclass(frozen=True)
class Case:
    """A choice for each of `VALUES`, or what random cases put in its place."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    """Of q, k and v."""
    head_dims: tuple[int, int]
    group: int
    kv_layout: str
    view: str
    qo_len: int
    kv_len: int
    mask: str
    window_left: int
    soft_cap: float | None
    position: str
    sinks: bool
    sm_scale: float | None
    scale_q: str
    scale_k: str
    scale_v: str
    k_scale: str
    v_scale: str
    fp16_reduction: bool
    o_dtype: str
    lse_base: str
    out: str
    lse: str
    nan_key: bool
    """NaN in a key of the first key head; the other heads keep their figures."""
    kv_heads: int = 2
    mask_share: float = 0.5

    @property
    def result_dtype(self) -> torch.dtype:
        q_dtype = self.dtypes[0]
        natural = BFLOAT16 if q_dtype in FP8_DTYPES else q_dtype
        if self.o_dtype == "other 16 bits":
            return FLOAT16 if natural == BFLOAT16 else BFLOAT16
        return torch.float32 if self.o_dtype == "float32" else natural


PLAIN = Case(**{name: values[0] for name, values in VALUES.items()})


@dataclass
class Call:
    """A case's tensors and arguments, as the function takes them and as `expect` does."""

    tensors: tuple[Tensor, Tensor, Tensor]
    arguments: dict[str, Any]
    plain_tensors: tuple[Tensor, Tensor, Tensor]
    plain_arguments: dict[str, Any]
    results: dict[str, Guarded]


def make_tensors(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, dense and NHD-shaped."""
    heads = case.group * case.kv_heads
    (dim_qk, dim_vo), dtypes = case.head_dims, case.dtypes
    q = normal(case.qo_len, heads, dim_qk, dtype=dtypes[0], device=device)
    k = normal(case.kv_len, case.kv_heads, dim_qk, dtype=dtypes[1], seed=1, device=device)
    v = normal(case.kv_len, case.kv_heads, dim_vo, dtype=dtypes[2], seed=2, device=device)
    if case.nan_key:
        k[case.kv_len // 2, 0] = math.nan
    return q, k, v


def make_call(
    case: Case, device: str, tensors: tuple[Tensor, Tensor, Tensor] | None = None
) -> Call:
    """The case's call, of its own tensors or of such as those of `make_tensors`."""
    q, k, v = make_tensors(case, device) if tensors is None else tensors
    heads = case.group * case.kv_heads
    common: dict[str, Any] = {
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap,
        "sm_scale": case.sm_scale,
        "scale_q": scale(case.scale_q, heads, 0.5, -1.5, device),
        "scale_k": scale(case.scale_k, case.kv_heads, 0.5, 1.25, device),
        "scale_v": scale(case.scale_v, case.kv_heads, 0.5, 2.0, device),
        "k_scale": scale(case.k_scale, 1, 0.8, 0.8, device),
        "v_scale": scale(case.v_scale, 1, -1.5, -1.5, device),
        "o_dtype": None if case.o_dtype == "default" else case.result_dtype,
        "lse_base": case.lse_base,
        "sinks": per_head(heads, -1.0, 4.0, device) if case.sinks else None,
    }
    if case.position.startswith("ALiBi"):
        given = per_head(heads, -0.1, 0.3, device) if case.position == "ALiBi, slopes" else None
        common |= {"pos_encoding_mode": "ALIBI", "alibi_slopes": given}
    elif case.position.startswith("RoPE"):
        scaled = {"rope_scale": 8.0, "rope_theta": 5e5} if case.position == "RoPE, scaled" else {}
        common |= {"pos_encoding_mode": "ROPE_LLAMA", **scaled}
    plain_mask, mask = masks(case, device)
    results = given_results(case, heads, device)
    arguments = {
        **common,
        **mask,
        "kv_layout": case.kv_layout,
        "use_fp16_qk_reduction": case.fp16_reduction,
        "return_lse": case.lse != "none",
        **{name: guarded.view for name, guarded in results.items()},
    }
    return Call(views(case, q, k, v), arguments, (q, k, v), common | plain_mask, results)


def scale(kind: str, heads: int, low: float, high: float, device: str) -> Tensor | float | None:
    if kind == "none":
        return None
    if kind == "float":
        return high
    return per_head(heads if kind == "per head" else 1, low, high, device)


def per_head(heads: int, low: float, high: float, device: str = "cuda") -> Tensor:
    return torch.linspace(low, high, heads, device=device)


def random_mask(qo_len: int, kv_len: int, share: float = 0.5, device: str = "cuda") -> Tensor:
    """Every fifth row shows nothing, every seventh all, every third no key of the first half."""
    generator = torch.Generator(device).manual_seed(qo_len * 10007 + kv_len)
    keep = torch.rand(qo_len, kv_len, generator=generator, device=device) < share
    row, key = torch.arange(qo_len, device=device), torch.arange(kv_len, device=device)
    keep |= (row % 7 == 3)[:, None]
    keep &= ~((row % 3 == 1)[:, None] & (key < kv_len // 2))
    return keep & (row % 5 != 2)[:, None]


def masks(case: Case, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mask for `expect`, and as given."""
    if case.mask in ("none", "causal"):
        band = {"causal": case.mask == "causal"}
        return band, band
    qo_len, kv_len = case.qo_len, case.kv_len
    keep = random_mask(qo_len, kv_len, case.mask_share, device)
    plain = {"custom_mask": keep}
    if case.mask == "bool":
        return plain, plain
    if case.mask == "bool, rows apart":
        wide = torch.ones(qo_len, kv_len + 6, dtype=torch.bool, device=device)
        wide[:, 5 : 5 + kv_len] = keep
        return plain, {"custom_mask": wide[:, 5 : 5 + kv_len]}
    if case.mask == "bool, columns apart":
        return plain, {"custom_mask": keep.t().contiguous().t()}
    bits = packbits(keep, bitorder="little")
    if case.mask == "packed, bytes apart":
        bits = bits.repeat_interleave(2)[::2]
    elif case.mask == "packed, odd address":
        bits = torch.cat((bits.new_full((3,), 0xFF), bits, bits.new_full((8,), 0xFF)))[3:-8]
        bits[-1] |= 0xFF << ((qo_len * kv_len - 1) % 8 + 1) & 0xFF  # past the last key: no meaning
    return plain, {"packed_custom_mask": bits}


def views(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v where the case wants them."""
    return (
        placed(q, case.view, "NHD"),
        placed(k, case.view, case.kv_layout),
        placed(v, case.view, case.kv_layout),
    )


def placed(x: Tensor, view: str, kv_layout: str) -> Tensor:
    """[length, heads, head_dim] as such a view, with the dimensions that the layout wants."""
    if view != "dense":
        x = relaid(x, view)
    if kv_layout == "NHD":
        return x
    x = x.transpose(0, 1)
    return x.contiguous() if view == "dense" else x


def given_results(case: Case, heads: int, device: str) -> dict[str, Guarded]:
    results = {}
    if case.out != "new":
        columns = {"rows": 0, "wide": 8, "odd strides": 1}[case.out]
        side = 1 if case.out == "wide" else 0
        shape = (case.qo_len, heads, case.head_dims[1])
        before, after = (16, side, 0), (16, side, columns)
        results["out"] = amid_nan(shape, before, after, case.result_dtype, device)
    if case.lse == "rows":
        results["lse"] = amid_nan((case.qo_len, heads), (16, 0), (16, 0), torch.float32, device)
    elif case.lse == "transposed":
        flipped = amid_nan((heads, case.qo_len), (1, 3), (1, 3), torch.float32, device)
        results["lse"] = Guarded(flipped.buffer.t(), flipped.index[::-1])
    return results


def check(
    case: Case,
    backend: str,
    device: str = "cuda",
    attention: Callable[..., Any] = single_prefill_with_kv_cache,
) -> None:
    """The backend's result is right, lies where it should, and is the same the second time."""
    call = make_call(case, device)
    told = explain(*call.tensors, backend=backend, **call.arguments)
    assert told.backend == backend, told.reason

    def results(**arguments: Any) -> tuple[Tensor, ...]:
        result = attention(*call.tensors, backend=backend, **arguments)
        return result if isinstance(result, tuple) else (result,)

    written = results(**call.arguments)
    ledger = Ledger()
    out, lse = written[0], written[1] if len(written) == 2 else None
    assert out.dtype == case.result_dtype
    expected = expect(
        *call.plain_tensors,
        **call.plain_arguments,
        of_kernel=backend != "reference",
        native=is_native(told),
    )
    ledger.result(str(case), out, lse, expected)
    for name, guarded in call.results.items():
        ledger.none(f"{case}: written beside {name}", guarded.written_outside())
    ledger.finish()
    again = results(**{n: x for n, x in call.arguments.items() if n not in call.results})
    for first, second in zip(written, again, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
