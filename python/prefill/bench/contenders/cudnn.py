"""cuDNN's float8 attention, where its Python frontend is installed (nvidia-cudnn-frontend)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from prefill.bench.cases import Case, Inputs
from prefill.bench.contenders.contender import Call

MODULE = "cudnn"
KNOWN = frozenset({"causal", "sm_scale", "scale_q", "scale_k", "scale_v"})
WEIGHT_SCALE = 448.0
"""Weights are at most 1, and float8_e4m3fn goes up to this: they are rounded over all its range."""


class CudnnFloat8:
    """`sdpa_fp8` of cuDNN's graphs; torch's SDPA takes no float8.

    A graph is built once for all input sets of a case, and executed on torch's stream.
    """

    name = "cudnn8"

    def __init__(self) -> None:
        self._handle: Any = None
        self._graph_of: tuple[Mapping[str, Any], _Graph] | None = None

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, case: Case, inputs: Inputs) -> Call:
        if any(dtype != torch.float8_e4m3fn for dtype in case.dtypes):
            raise NotImplementedError("cuDNN's sdpa_fp8 is for float8_e4m3fn q, k and v")
        if self._graph_of is None or self._graph_of[0] is not inputs.arguments:
            scales = _scales(inputs.arguments)
            cudnn = importlib.import_module(MODULE)
            self._handle = self._handle or cudnn.create_handle()
            self._graph_of = inputs.arguments, _Graph(cudnn, self._handle, case, inputs, scales)
        graph = self._graph_of[1]
        out = torch.empty(case.output_shape, dtype=graph.o_dtype, device=inputs.q.device)
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}

        def call() -> Tensor:
            graph.execute(tensors)
            return out

        return call

    def as_nhd(self, out: Tensor) -> Tensor:
        return out

    def dtype(self, case: Case, inputs: Inputs) -> torch.dtype:
        return torch.float8_e4m3fn


class _Graph:
    """A case's graph with its plan, its workspace and its scales."""

    def __init__(
        self, cudnn: Any, handle: Any, case: Case, inputs: Inputs, scales: Mapping[str, float]
    ) -> None:
        self._cudnn, self._handle = cudnn, handle
        self._device = device = inputs.q.device
        # Before Blackwell it has no kernel with an output of 16 bits.
        blackwell = torch.cuda.get_device_capability(device)[0] >= 10
        self.o_dtype = torch.bfloat16 if blackwell else torch.float8_e4m3fn
        types = cudnn.data_type
        self._graph = graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )
        operands = {
            name: graph.tensor(name=name, **_layout(x), data_type=types.FP8_E4M3)
            for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
        }
        factors = {name: graph.tensor(name=name, **_ONE, data_type=types.FLOAT) for name in scales}
        sm_scale = inputs.arguments.get("sm_scale")
        out, _, *maxima = graph.sdpa_fp8(
            **operands,
            **factors,
            attn_scale=1 / math.sqrt(case.heads.dim_qk) if sm_scale is None else sm_scale,
            generate_stats=False,
            **_causal(cudnn, case, inputs),
        )
        o_type = types.BFLOAT16 if blackwell else types.FP8_E4M3
        _describe(out, _layout(torch.empty(case.output_shape, device="meta")), o_type)
        out.set_output(True)
        for node in maxima:  # of weights and outputs, which nobody asks for
            _describe(node, _ONE, types.FLOAT)
            node.set_output(False)
        self._set_stream()
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._nodes = {**operands, "out": out}
        self._scales = {
            factors[name]: torch.full(_ONE["dim"], value, dtype=torch.float32, device=device)
            for name, value in scales.items()
        }
        size = max(1, graph.get_workspace_size())
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def execute(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute tensors["out"] of "q", "k" and "v"."""
        self._set_stream()
        buffers = {self._nodes[name]: tensor for name, tensor in tensors.items()}
        self._graph.execute(buffers | self._scales, self._workspace, handle=self._handle)

    def _set_stream(self) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)


_ONE = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}


def _layout(x: Tensor) -> dict[str, list[int]]:
    """Sizes and strides as [batch, heads, length, head_dim]."""
    view = x.transpose(0, 1).unsqueeze(0)
    return {"dim": list(view.shape), "stride": list(view.stride())}


def _describe(node: Any, layout: Mapping[str, list[int]], data_type: Any) -> None:
    node.set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(data_type)


def _scales(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Its six scales, each for a whole tensor; NotImplementedError for what it has no argument for.

    Outputs are averages of v, so they need no scale to fit.
    """
    unknown = [name for name in arguments if name not in KNOWN]
    if unknown:
        raise NotImplementedError(f"cuDNN's sdpa_fp8 has no {', '.join(unknown)}")
    given = {name: arguments.get(f"scale_{name}", 1.0) for name in "qkv"}
    by_head = [f"scale_{name}" for name, scale in given.items() if isinstance(scale, Tensor)]
    if by_head:
        raise NotImplementedError(f"cuDNN's sdpa_fp8 has no {', '.join(by_head)} by head")
    return {
        **{f"descale_{name}": float(scale) for name, scale in given.items()},
        "descale_s": 1 / WEIGHT_SCALE,
        "scale_s": WEIGHT_SCALE,
        "scale_o": 1.0,
    }


def _causal(cudnn: Any, case: Case, inputs: Inputs) -> dict[str, Any]:
    """A causal mask that ends at the last key.

    In a square one that begins at the first key is the same, and all that Hopper has.
    """
    if not inputs.arguments.get("causal") or case.length.qo == 1:
        return {}
    square = case.length.qo == case.length.kv
    alignment = cudnn.diagonal_alignment
    return {
        "diagonal_alignment": alignment.TOP_LEFT if square else alignment.BOTTOM_RIGHT,
        "right_bound": 0,
    }
