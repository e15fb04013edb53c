"""Each example runs on the GPU; context parallelism on two, where there are two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from example_runs import CONTEXT_PARALLEL, EXAMPLES, check_example


def skip_with_one_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU, and NCCL wants one for each of two processes")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    if example == CONTEXT_PARALLEL:
        skip_with_one_gpu()
    check_example(example, tmp_path, "nccl")


def test_context_parallel_under_torchrun(tmp_path: Path) -> None:
    skip_with_one_gpu()
    check_example(CONTEXT_PARALLEL, tmp_path, "nccl", torch.cuda.device_count())
