"""Diffusers' models on the kernels, against themselves on torch's attention; skipped without it.

The yardstick is that of the CPU tier: off by at most twice what torch's attention in the same 16
bits is off by. The videos are larger than there: kernels have several tiles to go through. (Torch
lets cuDNN use TF32 in float32 too. The one convolution here has inputs and weights of 16 bits,
which TF32 holds.)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("diffusers", "0.42")

from prefill.integrations.diffusers import register
from video_models import MODELS, Made, assert_as_good_as_torch, ready

pytestmark = pytest.mark.usefixtures("integration_on_kernels")
DEVICE = "cuda"
VIDEO = (3, 16, 14)
DTYPES = (torch.bfloat16, torch.float16)
Make = Callable[[tuple[int, int, int]], Made]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_model(backend: str, make: Make, dtype: torch.dtype) -> None:
    register(backend)
    assert_as_good_as_torch(*ready(make(VIDEO), dtype, DEVICE))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_model_on_the_backend_that_auto_takes(make: Make, dtype: torch.dtype) -> None:
    register()
    assert_as_good_as_torch(*ready(make(VIDEO), dtype, DEVICE))
