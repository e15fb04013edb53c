"""The GPU tier: every test runs on each backend that this build and device have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from prefill import support

sys.path.insert(0, str(Path(__file__).parent))


def reason_against(backend: str) -> str:
    """Why `backend` cannot run on the current device."""
    device = support.device_info(torch.device("cuda", torch.cuda.current_device()))
    return support.backend_reason(support.native(), backend, device.capability)


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=["fa2", "fa3"])
def backend(request: pytest.FixtureRequest, _cuda: None) -> str:
    reason = reason_against(request.param)
    if reason:
        pytest.skip(reason)
    return str(request.param)
