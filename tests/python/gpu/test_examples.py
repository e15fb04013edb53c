"""Each example runs on the GPU; context parallelism on two, where there are two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from example_runs import EXAMPLES, check_example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    if example.stem == "context_parallel" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU, and NCCL wants one for each of two processes")
    check_example(example, tmp_path, "nccl")
