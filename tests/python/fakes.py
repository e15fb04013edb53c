"""Devices, builds and a kernel that are not there: the native path runs on the CPU with these."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from prefill import ops, split_plan, support
from prefill.rope import alibi_slopes as alibi_rule
from prefill.rope import apply_llama_rope
from prefill.split_plan import SplitPlan
from prefill.support import BuildInfo, DeviceInfo, NativeLibrary

CLASSES = ((64, 64), (128, 128), (192, 128), (256, 256))
DTYPES = ("float16", "bfloat16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""Of fa3, but for the smallest class; fa2 widens it."""
WHOLE = SplitPlan(packed_heads=1, num_splits=1, num_row_tiles=1, num_whole_tiles=0)


def build_json(
    archs: dict[str, list[str]] | None = None,
    classes: tuple[tuple[int, int], ...] = CLASSES,
    dtypes: tuple[str, ...] = DTYPES,
    float8: tuple[str, ...] | None = None,
    smem_bytes: int = 98304,
) -> str:
    """The full build, or a trimmed one; its `float8` kernels go with all 16-bit dtypes."""
    if archs is None:
        archs = {"fa2": ["80-real", "90-real", "80-virtual"], "fa3": ["90a-real"]}
    if float8 is None:
        float8 = FLOAT8 if dtypes == DTYPES else ()
    rows = [(backend, dtype, dims) for backend in archs for dtype in dtypes for dims in classes]
    rows += [
        ("fa3", dtype, dims)
        for dtype in float8
        for dims in classes
        if "fa3" in archs and dims != CLASSES[0]
    ]
    kernels = [
        {
            "backend": backend,
            "dtype": dtype,
            "head_dim_qk": qk,
            "head_dim_vo": vo,
            "tile_m": 128,
            "tile_n": 64 if qk > 128 else 128,
            "stages": 2,
            "threads": 128,
            "smem_bytes": smem_bytes,
        }
        for backend, dtype, (qk, vo) in rows
    ]
    info = {"version": "0.1.0", "cuda": "13.0", "cutlass": "4.2.0", "torch_target": "2.10"}
    return json.dumps(info | {"archs": archs, "kernels": kernels})


def library(**kwargs: Any) -> NativeLibrary:
    return NativeLibrary(BuildInfo.from_json(build_json(**kwargs)))


def cuda(major: int, minor: int, smem_per_block: int = 0, num_sms: int = 132) -> DeviceInfo:
    name = f"Fake GPU sm_{major}{minor}"
    return DeviceInfo("cuda", 0, name, (major, minor), smem_per_block, num_sms)


@dataclass
class StubPlan:
    """`prefill::split_plan`: one answer to all calls, which it keeps."""

    answer: SplitPlan
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        backend: str,
        dtype: str,
        qo_len: int,
        kv_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        window_left: int,
        window_right: int,
        packs: bool,
        only_parts: bool,
        num_sms: int,
        num_splits: int,
    ) -> str:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        return json.dumps(asdict(self.answer))


@dataclass
class StubKernel:
    """`prefill::attention` for CPU tensors: computes what the op promises, keeps the calls."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(
        self,
        backend: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale_q: Tensor | None,
        scale_k: Tensor | None,
        scale_v: Tensor | None,
        mask: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        window_left: int,
        window_right: int,
        alibi: bool,
        rope: bool,
        rope_scale: float,
        rope_theta: float,
        soft_cap: float,
        sm_scale: float,
        v_scale: float,
        lse_scale: float,
        num_splits: int,
    ) -> None:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        if rope:
            q, k = (
                apply_llama_rope(x, first, rope_scale, rope_theta, q.dtype)
                for x, first in ((q, k.shape[0] - q.shape[0]), (k, 0))
            )
        qo_len, heads, _ = q.shape
        kv_len, kv_heads, _ = k.shape
        group = heads // kv_heads
        ones_q, ones_k = torch.ones(heads), torch.ones(kv_heads)
        per_head_q = ones_q if scale_q is None else scale_q
        per_head_k = (ones_k if scale_k is None else scale_k).repeat_interleave(group)
        per_head_v = (ones_k if scale_v is None else scale_v).repeat_interleave(group)
        keys = k.double().repeat_interleave(group, 1)
        values = v.double().repeat_interleave(group, 1)
        logits = torch.einsum("ihd,jhd->hij", q.double(), keys) * sm_scale
        logits = logits * (per_head_q * per_head_k).double()[:, None, None]
        if soft_cap > 0.0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        position = torch.arange(qo_len)[:, None] + kv_len - qo_len
        key = torch.arange(kv_len)[None, :]
        if alibi:
            slopes = alibi_rule(heads) if alibi_slopes is None else alibi_slopes
            logits = logits + slopes.double()[:, None, None] * (key - position)
        seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
        if window_left >= 0:
            seen &= key >= position - window_left
        if window_right >= 0:
            seen &= key <= position + window_right
        if mask is not None:
            assert mask.stride(-1) == 1 or mask.shape[-1] == 1
            if mask.dtype == torch.bool:
                assert mask.shape == (qo_len, kv_len)
                seen &= mask
            else:
                assert mask.dtype == torch.uint8
                assert mask.shape == ((qo_len * kv_len + 7) // 8,)
                bit = torch.arange(qo_len * kv_len)
                seen &= ((mask[bit // 8] >> (bit % 8)) & 1).bool().view(qo_len, kv_len)
        logits = logits.masked_fill(~seen, -math.inf)
        sink = torch.full((heads,), -math.inf) if sinks is None else sinks
        joined = torch.cat((logits, sink.double()[:, None, None].expand(-1, qo_len, 1)), -1)
        empty = (logits == -math.inf).all(-1, keepdim=True)  # so is a row that sees only -inf
        weights = torch.where(empty, 0.0, torch.softmax(joined, -1)[..., :-1])
        result = torch.einsum("hij,jhd->ihd", weights, values)
        result = result.masked_fill(empty.transpose(0, 1), 0.0)  # not 0 * NaN
        out.copy_(result * per_head_v[:, None].double() * v_scale)
        if lse is not None:
            base_2 = torch.logsumexp(joined, -1).t() / math.log(2.0)
            lse.copy_(base_2 * lse_scale)


_current = StubKernel()
_libraries: list[torch.library.Library] = []


def _dispatch(*args: Any) -> None:
    _current(*args)


def stub_kernel(kind: type[StubKernel] = StubKernel) -> StubKernel:
    """Put a fresh stub behind `prefill::attention`; the registration stays for the process."""
    global _current
    _current = kind()
    if not _libraries:
        fragment: Any = torch.library.Library("prefill", "FRAGMENT")  # type: ignore[no-untyped-call]
        if not hasattr(torch.ops.prefill, "attention"):
            fragment.define("attention" + ops._SIGNATURE)
        fragment.impl("attention", _dispatch, "CPU")
        _libraries.append(fragment)
        if ops._attention is None:
            ops.register()
    return _current


def pretend_build(
    monkeypatch: pytest.MonkeyPatch,
    native: NativeLibrary | None = None,
    plan: SplitPlan = WHOLE,
) -> StubPlan:
    """Take the full build, or `native`, for the one that is loaded, whatever the driver."""
    stub = StubPlan(plan)
    monkeypatch.setattr(support, "_native", library() if native is None else native)
    monkeypatch.setattr(support, "driver_version", lambda: 0)
    monkeypatch.setattr(split_plan, "_ask", stub)
    return stub


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    device: DeviceInfo | None = None,
    native: NativeLibrary | None = None,
    kind: type[StubKernel] = StubKernel,
) -> StubKernel:
    """Take CPU tensors for tensors on `device`, and the full build for the one that is loaded."""
    chosen = cuda(9, 0) if device is None else device

    @support.constant_under_compile
    def device_info(_: torch.device) -> DeviceInfo:
        return chosen

    monkeypatch.setattr(support, "device_info", device_info)
    pretend_build(monkeypatch, native)
    return stub_kernel(kind)
