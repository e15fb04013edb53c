"""Which calls are multiplied in float8, on builds with and without kernels for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prefill
from cases import BFLOAT16, E4M3, E5M2, FLOAT16
from fakes import cuda, library, pretend, pretend_build
from layouts import relaid
from prefill import kernel_dtype, ops
from prefill.backends import PRIORITY, resolve
from prefill.request import PrefillRequest, make_request
from prefill.support import NativeLibrary

FLOAT32 = torch.float32
H100 = cuda(9, 0)


def request(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (E4M3,) * 3,
    head_dims: tuple[int, int] = (128, 128),
    lengths: tuple[int, int] = (2, 3),
    heads: tuple[int, int] = (4, 2),
    moved: tuple[str, str] | None = None,
    **arguments: Any,
) -> PrefillRequest:
    """A call; `moved` names one of q, k and v, and the view as which it lies."""
    shapes = {
        "q": (lengths[0], heads[0], head_dims[0]),
        "k": (lengths[1], heads[1], head_dims[0]),
        "v": (lengths[1], heads[1], head_dims[1]),
    }
    tensors: dict[str, Tensor] = {
        name: torch.zeros(shape).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }
    if moved is not None:
        name, view = moved
        x = tensors[name]
        if view == "rows of 8 bytes":
            x = torch.zeros(*x.shape[:2], x.shape[2] + 8).to(x.dtype)[..., : x.shape[2]]
        elif view == "rows of 8 bytes, odd address":
            wide = torch.zeros(x.shape[0] * x.shape[1] * (x.shape[2] + 8) + 8).to(x.dtype)
            x = wide[8:].view(*x.shape[:2], -1)[..., : x.shape[2]]
        else:
            x = relaid(x, view)
        tensors[name] = x
    if arguments.get("kv_layout") == "HND":
        tensors |= {name: tensors[name].transpose(0, 1) for name in "kv"}
    return make_request(*tensors.values(), **arguments)


RULE: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "all e4m3fn": ({}, E4M3),
    "all e5m2": ({"dtypes": (E5M2,) * 3}, E5M2),
    "float16 out": ({"o_dtype": FLOAT16}, E4M3),
    "float32 out": ({"o_dtype": FLOAT32}, E4M3),
    "ALiBi": ({"pos_encoding_mode": "ALIBI"}, E4M3),
    "a mask": ({"custom_mask": torch.ones(2, 3) > 0}, E4M3),
    "HND": ({"kv_layout": "HND"}, E4M3),
    "small head dims": ({"head_dims": (16, 32)}, BFLOAT16),
    "64": ({"head_dims": (64, 64)}, BFLOAT16),
    "96/48": ({"head_dims": (96, 48)}, E4M3),
    "64/80": ({"head_dims": (64, 80)}, E4M3),
    "192/128": ({"head_dims": (192, 128)}, E4M3),
    "one row, one head": ({"lengths": (1, 1), "heads": (1, 1)}, E4M3),
    "RoPE": ({"pos_encoding_mode": "ROPE_LLAMA"}, BFLOAT16),
    "RoPE, float32 out": ({"pos_encoding_mode": "ROPE_LLAMA", "o_dtype": FLOAT32}, FLOAT16),
    "q of another float8": ({"dtypes": (E5M2, E4M3, E4M3)}, BFLOAT16),
    "k of another float8": ({"dtypes": (E4M3, E5M2, E4M3)}, BFLOAT16),
    "v of another float8": ({"dtypes": (E4M3, E4M3, E5M2), "o_dtype": FLOAT16}, FLOAT16),
    "float16 q": ({"dtypes": (FLOAT16, E4M3, E4M3), "o_dtype": BFLOAT16}, FLOAT16),
    "bfloat16 q": ({"dtypes": (BFLOAT16, E4M3, E4M3)}, BFLOAT16),
    "all float16": ({"dtypes": (FLOAT16,) * 3}, FLOAT16),
    "head dims of 8": ({"head_dims": (72, 64)}, BFLOAT16),
    "head dims of v of 8": ({"head_dims": (96, 40)}, BFLOAT16),
    "256": ({"head_dims": (256, 256)}, E4M3),
    **{f"{x}, fused": ({"moved": (x, "fused")}, E4M3) for x in "qkv"},
    **{f"{x}, rows of 8 bytes": ({"moved": (x, "rows of 8 bytes")}, BFLOAT16) for x in "qkv"},
    # What is copied is dense.
    **{f"{x}, odd strides": ({"moved": (x, "odd strides")}, E4M3) for x in "qkv"},
    **{f"{x}, odd address": ({"moved": (x, "odd address")}, E4M3) for x in "qkv"},
    "copied for its address": ({"moved": ("k", "rows of 8 bytes, odd address")}, E4M3),
}
"""A call, and what its kernel of fa3 multiplies in where the build has all of them."""


@pytest.mark.parametrize("name", RULE)
def test_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    choices, dtype = RULE[name]
    call = request(**choices)
    widened = kernel_dtype.widened(call.q.dtype, call.o_dtype)
    pretend_build(monkeypatch)
    assert kernel_dtype.of("fa3", call) == dtype
    assert kernel_dtype.of("fa2", call) == widened
    pretend_build(monkeypatch, library(float8=()))
    assert kernel_dtype.of("fa3", call) == widened
    pretend_build(monkeypatch, NativeLibrary(None, "no library"))
    assert kernel_dtype.of("fa3", call) == widened


@pytest.mark.parametrize("head_dims", [(256, 256), (144, 144)])
def test_no_class_for_the_head_dims(
    monkeypatch: pytest.MonkeyPatch, head_dims: tuple[int, int]
) -> None:
    pretend_build(monkeypatch, library(classes=((64, 64), (128, 128), (192, 128))))
    assert kernel_dtype.of("fa3", request(head_dims=head_dims)) == BFLOAT16


@pytest.mark.parametrize(("float8", "other"), [(E4M3, E5M2), (E5M2, E4M3)])
def test_a_build_may_have_one_of_them(
    monkeypatch: pytest.MonkeyPatch, float8: torch.dtype, other: torch.dtype
) -> None:
    pretend_build(monkeypatch, library(float8=(str(float8).removeprefix("torch."),)))
    assert kernel_dtype.of("fa3", request((float8,) * 3)) == float8
    assert kernel_dtype.of("fa3", request((other,) * 3)) == BFLOAT16


def test_what_is_written() -> None:
    assert [kernel_dtype.written_by(x) for x in (E4M3, E5M2, BFLOAT16)] == [BFLOAT16] * 3
    assert kernel_dtype.written_by(FLOAT16) == FLOAT16


def test_the_resolver_asks_for_that_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with nothing but float8 takes what it multiplies so, and says what it lacks."""
    pretend_build(monkeypatch, library(dtypes=(), float8=("float8_e4m3fn",)))
    fa3 = PRIORITY[0]
    assert resolve(request(), H100) == "fa3"
    rotated = request(pos_encoding_mode="ROPE_LLAMA")
    assert fa3.unsupported_reasons(rotated, H100) == [
        "bfloat16 is not in this build of fa3, which has float8_e4m3fn"
    ]
    assert resolve(rotated, H100) == "reference"
    large = library(smem_bytes=200 << 10)
    pretend_build(monkeypatch, large)
    [reason] = fa3.unsupported_reasons(request(), cuda(9, 0, 99 << 10))
    assert reason.startswith("kernel fa3_float8_e4m3fn_128x128 needs 204800 bytes")


@pytest.mark.parametrize("view", ["rows of 8 bytes", "rows of 8 bytes, odd address"])
def test_tracing_asks_for_no_address(monkeypatch: pytest.MonkeyPatch, view: str) -> None:
    """Nor does it fail: a tensor that may be copied counts as one that is not."""
    pretend(monkeypatch)
    call = request(moved=("k", view))
    tensors = [x.contiguous() if x is call.v else x for x in (call.q, call.k, call.v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = prefill.single_prefill_with_kv_cache(q, k, v)
        return out

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), attend(*tensors))


def test_strides_alone_tell_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same where no address is known."""
    pretend_build(monkeypatch, library(dtypes=(), float8=("float8_e4m3fn",)))
    call = request()
    heads, head_dim = call.k.shape[1:]
    rows = (heads * (head_dim + 1), head_dim + 1, 1)
    strided = torch.empty_strided(call.k.shape, rows, dtype=call.k.dtype)
    call = call._replace(k=strided)
    eager = kernel_dtype.of("fa3", call)
    assert eager == E4M3
    monkeypatch.setattr(ops, "has_address", lambda _: False)
    assert kernel_dtype.of("fa3", call) == eager
