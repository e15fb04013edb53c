"""What every test shares: helper modules beside the tests, and a fresh start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from prefill import request


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_warned_causal_with_mask", False)
    torch.manual_seed(0)
