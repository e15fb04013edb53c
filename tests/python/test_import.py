"""What importing pulls in. (`test_binary.py` measures its time where the library is there.)"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from prefill import support

PROGRAM = """
import json, sys, torch
before = set(sys.modules)
import prefill
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_brings_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    modules = json.loads(done.stdout)
    assert "prefill" in modules
    heavy = {"torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "sympy", "numpy"}
    assert not heavy & set(modules)


def test_the_compiler_knows_the_mark() -> None:
    """`constant_under_compile` sets torch's own attribute."""

    @torch.compiler.assume_constant_result
    def marked() -> None: ...

    assert vars(marked).keys() == vars(support.build_reason).keys()
    assert vars(marked).keys() == vars(support.device_info).keys()
