"""The programs in examples/: each compares its own result with the plain call's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import prefill

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
CONTEXT_PARALLEL = next(path for path in EXAMPLES if path.stem == "context_parallel")
SAYS = {
    "context_parallel": "{processes} processes over {transport}, 96 rows each: largest difference",
    "long_context_chunks": "600 rows in 5 chunks: largest difference from one call",
    "tree_speculation": "11 drafted tokens: 3 accepted and one more chosen",
    "video_diffusion_block": "3 clips of [212, 199, 193] tokens: right without masks",
}
"""How what they print begins."""


def check_example(
    example: Path, folder: Path, transport: str, torchrun: int = 0, **environment: str
) -> None:
    """Run it in that folder with these variables; `transport` is what its processes should use.

    `torchrun` is how many processes torchrun starts; 0: the program is run by itself.
    """
    package = str(Path(prefill.__file__).parents[1])
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    done = subprocess.run(
        [sys.executable, *(launcher if torchrun else []), str(example)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": package} | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = SAYS[example.stem].format(transport=transport, processes=torchrun or 2)
    assert [line.startswith(said) for line in done.stdout.splitlines()].count(True) == 1
