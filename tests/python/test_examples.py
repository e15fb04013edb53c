"""Each example runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_runs import CONTEXT_PARALLEL, EXAMPLES, check_example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    check_example(example, tmp_path, "gloo", CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_context_parallel_under_torchrun(processes: int, tmp_path: Path) -> None:
    check_example(CONTEXT_PARALLEL, tmp_path, "gloo", processes, CUDA_VISIBLE_DEVICES="")
