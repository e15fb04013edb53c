"""quantize_per_head on the device: the same bits as on the CPU, and inside a graph."""

from __future__ import annotations

import pytest
import torch

from exactness import normal
from prefill import quantize_per_head

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", FP8)
def test_equals_the_cpu(dtype: torch.dtype, source: torch.dtype) -> None:
    for seed in range(5):
        x = normal(700, 6, 96, dtype=source, seed=seed, device="cuda")
        tensor, scale = quantize_per_head(x, dtype)
        on_cpu, scale_on_cpu = quantize_per_head(x.cpu(), dtype)
        assert torch.equal(scale.cpu(), scale_on_cpu)
        assert torch.equal(tensor.cpu().view(torch.uint8), on_cpu.view(torch.uint8))


def test_in_a_graph() -> None:
    """No host synchronisation: it can be captured, and replays with new data."""
    x = normal(128, 4, 64, dtype=torch.bfloat16, seed=1, device="cuda")
    quantize_per_head(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor, scale = quantize_per_head(x)
    x.copy_(normal(128, 4, 64, dtype=torch.bfloat16, seed=2, device="cuda") * 3)
    graph.replay()
    expected, expected_scale = quantize_per_head(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
