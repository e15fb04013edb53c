"""Each example runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_runs import EXAMPLES, check_example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    check_example(example, tmp_path, "gloo", CUDA_VISIBLE_DEVICES="")
