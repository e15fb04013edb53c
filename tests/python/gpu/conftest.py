"""The GPU tier: every test runs on each backend that this build and device have.

With PREFILL_REQUIRE_GPU=1 a missing device, or a build of which nothing runs on it, is a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefill import ops, support

sys.path.insert(0, str(Path(__file__).parent))


BACKENDS = ("fa2", "fa3")
REQUIRED = os.environ.get("PREFILL_REQUIRE_GPU", "0") not in ("", "0")


def reason_against(backend: str) -> str:
    """Why `backend` cannot run on the current device."""
    device = support.device_info(torch.device("cuda", torch.cuda.current_device()))
    return support.backend_reason(support.native(), backend, device.capability)


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        if REQUIRED:
            pytest.fail("no CUDA device, and PREFILL_REQUIRE_GPU is set")
        pytest.skip("no CUDA device")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, _cuda: None) -> str:
    reason = reason_against(request.param)
    if reason:
        if REQUIRED and all(reason_against(name) for name in BACKENDS):
            pytest.fail(f"no backend runs here, and PREFILL_REQUIRE_GPU is set: {reason}")
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends on the reference, as "auto" has it where no kernel will do, is a failure."""
    monkeypatch.setattr(
        ops, "reference_attention", lambda request: pytest.fail("the reference was called")
    )


@pytest.fixture
def integration_on_kernels(request: pytest.FixtureRequest, kernels_only: None) -> Iterator[None]:
    """For tests of an integration, whose module has its `register`: "auto" again afterwards."""
    with torch.no_grad():
        yield
    request.module.register()
