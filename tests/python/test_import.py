"""Importing is cheap and touches no device."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from prefill import support

PROGRAM = """
import json, sys, time, torch
before = set(sys.modules)
start = time.process_time()
import prefill
seconds = time.process_time() - start
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_import_is_cheap_and_leaves_the_device_alone() -> None:
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        runs.append(json.loads(done.stdout))
    assert not runs[0]["cuda"]
    heavy = {"torch._dynamo", "torch._inductor", "sympy", "numpy", "pytest"}
    assert not heavy & set(runs[0]["modules"])
    # 50 ms beyond torch's own import, by processor time; twice that for a busy machine.
    assert min(run["seconds"] for run in runs) < 0.1


def test_the_compiler_knows_the_mark() -> None:
    """`constant_under_compile` sets torch's own attribute."""

    @torch.compiler.assume_constant_result
    def marked() -> None: ...

    assert vars(marked).keys() == vars(support.build_reason).keys()
    assert vars(marked).keys() == vars(support.device_info).keys()
