"""Each example runs; it compares its own result with the plain call's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prefill

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
SAYS = {
    "context_parallel": "2 processes with 96 rows each: largest difference from one call",
    "long_context_chunks": "600 rows in 5 chunks: largest difference from one call",
    "tree_speculation": "11 drafted tokens: 3 accepted and one more chosen",
    "video_diffusion_block": "3 clips of [212, 199, 193] tokens: right without masks",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path, tmp_path: Path) -> None:
    package = str(Path(prefill.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": package, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(SAYS[example.stem])
