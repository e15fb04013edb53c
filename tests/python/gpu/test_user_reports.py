"""Each kind of fault that users of such kernels reported, on the kernels."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from user_reports import REPORTS, Run


@pytest.mark.parametrize("report", REPORTS)
def test_report(backend: str, report: str) -> None:
    REPORTS[report](Run(backend, "cuda"))


def test_fi714_the_time_of_a_window_does_not_grow_with_the_keys(backend: str) -> None:
    """64 times the keys: a loop over all of them takes some 60 times as long."""
    run = Run(backend, "cuda")
    shortest = {}
    for kv_len in (1024, 65_536):
        tensors = run.inputs(128, kv_len, (32, 4), 128)
        shortest[kv_len] = min(milliseconds(run, tensors) for _ in range(20))
    assert shortest[65_536] < 4 * shortest[1024] + 0.02


def milliseconds(run: Run, tensors: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    time.sleep(0.001)
    torch.cuda._sleep(1_000_000)  # launches are ahead of the device
    start.record()
    for _ in range(5):
        run(*tensors, causal=True, window_left=256)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 5
