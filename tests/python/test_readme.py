"""What the README says of the kernels is what the full build says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import prefill
from prefill import support

ROOT = Path(__file__).parents[2]


def kernel_table(build: support.BuildInfo) -> str:
    """The README's table of backends, archs, dtypes and head-dim classes."""
    lines = [
        "| backend | archs | dtypes | head-dim classes (QK x VO) |",
        "| --- | --- | --- | --- |",
    ]
    for backend, archs in build.archs.items():
        kernels = build.kernels_of(backend)
        dtypes = dict.fromkeys(kernel.dtype for kernel in kernels)
        dims = dict.fromkeys(f"{kernel.head_dim_qk}x{kernel.head_dim_vo}" for kernel in kernels)
        cells = [backend, ", ".join(archs), ", ".join(dtypes), ", ".join(dims)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def listed_kernels() -> int:
    """How many kernels the list has: the product of dtypes and head dims of each family."""
    text = (ROOT / "cmake/PrefillKernels.cmake").read_text()
    families = re.findall(r"DTYPES ([^\n]+)\n\s*HEAD_DIMS ([0-9x ]+)", text)
    return sum(len(dtypes.split()) * len(dims.split()) for dtypes, dims in families)


def test_kernel_table() -> None:
    build = support.native().build
    if build is None or len(build.kernels) < listed_kernels():
        pytest.skip("a trimmed build, or one without kernels")
    readme = (ROOT / "README.md").read_text()
    match = re.search(r"<!-- kernels: begin -->\n(.*)\n<!-- kernels: end -->", readme, re.DOTALL)
    assert match is not None
    assert match[1] == kernel_table(build)


def test_version_stands_in_one_place() -> None:
    build = support.native().build
    if build is not None:
        assert build.version == prefill.__version__
