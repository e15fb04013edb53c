"""A copy of the source tree whose kernels compute nothing: all of a build but the time it takes.

CMake, the compilers, ccache, ptxas's report, the linker, torch's headers and the wheel are real.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("cmake", "csrc", "python/prefill")
OPTIONS = {
    "PREFILL_KERNELS": "ON",
    "PREFILL_ARCHS": "sm90",
    "PREFILL_HEAD_DIMS": "64x64",
    "PREFILL_DTYPES": "float16",
}
"""One kernel of each backend."""
NUM_KERNELS = 2

LAUNCH = """\
#pragma once
#include <cuda_runtime_api.h>
#include "common/kernel_key.h"
#include "common/params.h"
namespace prefill::{backend} {{
template <DType, class> KernelInfo kernel_info() {{ return {{128, 128, 1, 128, 0}}; }}
template <DType, class> cudaError_t launch(const PrefillParams&, cudaStream_t) {{
  return cudaErrorNotSupported;
}}
}}
"""
PASS = """\
#include "common/{name}.h"
namespace prefill {{
cudaError_t {function} {{ return cudaErrorNotSupported; }}
}}
"""
PASSES = {
    "combine": "combine(const PrefillParams&, const TileSchedule&, int, int, bool, cudaStream_t)",
    "prepare": "prepare(const PreparePass&, DType, bool, cudaStream_t)",
    "mask_tiles": "lay_out_mask(const MaskSource&, const PrefillParams&, int, int, "
    "const MaskTiles&, bool, cudaStream_t)",
}


def hollow_tree(tree: Path) -> Path:
    """Make one there."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tree)
    for backend in ("fa2", "fa3"):
        (tree / f"csrc/{backend}/launch.cuh").write_text(LAUNCH.format(backend=backend))
    for name, function in PASSES.items():
        text = PASS.format(name=name, function=function)
        (tree / f"csrc/common/{name}.cu").write_text(text)
    return tree
