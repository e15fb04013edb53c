"""Modules with the functions of other libraries' attention, which compute what those promise."""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module to be found and imported during the test."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Modules that cannot be imported during the test, installed or not."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def softmax_weights(logits: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Weights [heads, rows, keys]; a sink of a head joins their sum."""
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is None:
        return logits.softmax(-1)
    column = sinks[:, None, None].expand(-1, logits.shape[1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


class FakeFlashAttention4:
    """`flash_attn.cute`: [batch, length, heads, head_dim], a pair of output and LSE."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        install(monkeypatch, "flash_attn", __path__=[])
        install(monkeypatch, "flash_attn.cute", flash_attn_func=self.flash_attn_func)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        (_, rows, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
        k, v = (x[0].repeat_interleave(heads // kv_heads, 1).float() for x in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q[0].float(), k) * (softmax_scale or dim**-0.5)
        if softcap:
            logits = (logits / softcap).tanh() * softcap
        left, right = window_size[0], 0 if causal else window_size[1]
        distance = torch.arange(keys) - (torch.arange(rows) + keys - rows)[:, None]
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        out = torch.einsum("hij,jhd->ihd", softmax_weights(logits, seen, learnable_sink), v)
        return out.to(q.dtype)[None], None


class FakeNode:
    """A tensor of a cuDNN graph."""

    def __init__(self, **described: Any) -> None:
        self.described = described
        self.is_output: bool | None = None

    def set_dim(self, dim: list[int]) -> FakeNode:
        self.described["dim"] = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeNode:
        self.described["stride"] = stride
        return self

    def set_data_type(self, data_type: str) -> FakeNode:
        self.described["data_type"] = data_type
        return self

    def set_output(self, is_output: bool) -> FakeNode:
        self.is_output = is_output
        return self

    def read(self, buffer: Tensor) -> Tensor:
        """The memory of a buffer, as this node says that it lies; the dtype has to be its own."""
        assert DATA_TYPES[self.described["data_type"]] == buffer.dtype
        return buffer.as_strided(self.described["dim"], self.described["stride"])


DATA_TYPES = {
    "FP8_E4M3": torch.float8_e4m3fn,
    "BFLOAT16": torch.bfloat16,
    "FLOAT": torch.float32,
}


class FakeGraph:
    """A graph of one `sdpa_fp8`, which is executed once it is built."""

    def __init__(self, cudnn: FakeCudnn, options: dict[str, Any]) -> None:
        self._cudnn = cudnn
        self.options = options
        self.node: dict[str, Any] = {}
        self.outputs: list[FakeNode] = []
        self.modes: list[str] = []

    def tensor(self, **described: Any) -> FakeNode:
        return FakeNode(**described)

    def sdpa_fp8(self, **arguments: Any) -> list[FakeNode | None]:
        self.node = arguments
        self.outputs = [FakeNode() for _ in range(3)]
        out, *maxima = self.outputs
        return [out, None, *maxima]

    def build(self, modes: list[str]) -> None:
        assert all({"dim", "stride", "data_type"} <= set(x.described) for x in self.outputs)
        self.modes = modes

    def get_workspace_size(self) -> int:
        return 96

    def execute(self, buffers: dict[FakeNode, Tensor], workspace: Tensor, handle: object) -> None:
        assert self.modes
        assert workspace.numel() >= 96
        assert handle is self.options["handle"] is self._cudnn.handles[-1]
        self._cudnn.executed.append(self)
        node = self.node
        q, k, v = (node[name].read(buffers[node[name]])[0].float() for name in "qkv")
        scales = {
            name: float(node[name].read(buffers[node[name]]))
            for name in node
            if name.startswith(("scale_", "descale_"))
        }
        self._cudnn.scales.append(scales)
        (heads, rows, _), (kv_heads, keys, _) = q.shape, k.shape
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        factor = node["attn_scale"] * scales["descale_q"] * scales["descale_k"]
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if node.get("right_bound") == 0:
            from_end = node["diagonal_alignment"] == "BOTTOM_RIGHT"
            seen = seen.tril(keys - rows if from_end else 0)
        weights = softmax_weights(q @ k.mT * factor, seen) * scales["scale_s"]
        rounded = weights.to(torch.float8_e4m3fn).float() * scales["descale_s"]
        (out, *maxima), result = self.outputs, rounded @ v * scales["descale_v"]
        assert out.is_output
        assert not any(each.is_output for each in maxima)
        out.read(buffers[out]).copy_((result * scales["scale_o"])[None])


class FakeCudnn:
    """`cudnn`, the frontend, on a device of that capability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.handles: list[object] = []
        self.streams: list[int] = []
        self.graphs: list[FakeGraph] = []
        self.executed: list[FakeGraph] = []
        self.scales: list[dict[str, float]] = []
        named = SimpleNamespace
        install(
            monkeypatch,
            "cudnn",
            data_type=named(**{name: name for name in DATA_TYPES}),
            diagonal_alignment=named(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"),
            heur_mode=named(A="A", FALLBACK="FALLBACK"),
            create_handle=self.create_handle,
            set_stream=self.set_stream,
            pygraph=self.pygraph,
        )
        stream = named(cuda_stream=77)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def create_handle(self) -> object:
        self.handles.append(object())
        return self.handles[-1]

    def set_stream(self, handle: object, stream: int) -> None:
        assert handle is self.handles[-1]
        self.streams.append(stream)

    def pygraph(self, **options: Any) -> FakeGraph:
        self.graphs.append(FakeGraph(self, options))
        return self.graphs[-1]
