"""What every test shares: helpers beside the tests can be imported, warnings that are said once
start afresh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from prefill import request


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(request, "_warned_causal_with_mask", False)
    torch.manual_seed(0)
    yield
