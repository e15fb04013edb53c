"""What the README and docs/backends.md say of the kernels is what the full build says of itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import prefill
from fakes import library
from prefill import support
from prefill.backends import PRIORITY, NativeBackend
from support_table import FEATURES, PAGE, auto_table, marked, support_table, tables

ROOT = Path(__file__).parents[2]


def kernel_table(build: support.BuildInfo) -> str:
    """The README's table of backends, archs, dtypes and head-dim classes."""
    lines = [
        "| backend | archs | dtypes | head-dim classes (QK x VO) |",
        "| --- | --- | --- | --- |",
    ]
    for backend, archs in build.archs.items():
        for dtypes, dims in families(build, backend):
            cells = [backend, ", ".join(archs), ", ".join(dtypes), ", ".join(dims)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def families(build: support.BuildInfo, backend: str) -> list[tuple[list[str], list[str]]]:
    """Dtypes of the same head-dim classes, and these."""
    dims_of: dict[str, list[str]] = {}
    for kernel in build.kernels_of(backend):
        dims = f"{kernel.head_dim_qk}x{kernel.head_dim_vo}"
        dims_of.setdefault(kernel.dtype, []).append(dims)
    alike: dict[tuple[str, ...], list[str]] = {}
    for dtype, dims in dims_of.items():
        alike.setdefault(tuple(dims), []).append(dtype)
    return [(dtypes, [*dims]) for dims, dtypes in alike.items()]


def listed_kernels() -> int:
    """How many kernels the list has: the product of dtypes and head dims of each family."""
    text = (ROOT / "cmake/PrefillKernels.cmake").read_text()
    families = re.findall(r"DTYPES ([^\n]+)\n\s*HEAD_DIMS ([0-9x ]+)", text)
    return sum(len(dtypes.split()) * len(dims.split()) for dtypes, dims in families)


def test_kernel_table() -> None:
    build = support.native().build
    if build is None or len(build.kernels) < listed_kernels():
        pytest.skip("a trimmed build, or one without kernels")
    match = marked("kernels").search((ROOT / "README.md").read_text())
    assert match is not None
    assert match[1] == kernel_table(build) + "\n"


@pytest.mark.parametrize("name", ["auto", "devices", "support"])
@pytest.mark.parametrize("which", ["full", "loaded"])
def test_backends_page(which: str, name: str) -> None:
    """To write it again: python tests/python/support_table.py."""
    native = library() if which == "full" else support.native()
    if native.build is None or len(native.build.kernels) < listed_kernels():
        pytest.skip("a trimmed build, or one without kernels")
    match = marked(name).search(PAGE.read_text())
    assert match is not None
    assert match[1] == tables(native)[name] + "\n", "python tests/python/support_table.py"


def test_support_table_has_every_argument_and_no_empty_cell() -> None:
    named = {each for feature in FEATURES for each in feature.arguments.split(", ")}
    signature = inspect.signature(prefill.single_prefill_with_kv_cache)
    assert named - {"together"} == set(signature.parameters) - {"backend"}
    rows = support_table(library()).splitlines()[2:]
    assert len(rows) == len(FEATURES)
    for row in rows:
        cells = row.strip("| ").split(" | ")[2:5]
        assert len(cells) == 3
        kinds = r"yes$|yes, copies \w|yes, in float8$|no: \w"
        assert all(re.match(kinds, cell) for cell in cells), row
        assert cells[2] == "yes"


def test_auto_table_is_the_order_of_backends() -> None:
    rows = re.findall(r"^\| (\d+) +\| (\w+)", auto_table(), re.MULTILINE)
    assert rows == [(str(number), backend.name) for number, backend in enumerate(PRIORITY, 1)]


def test_support_table_follows_the_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeBackend, "unsupported_reasons", lambda *_: ["it is off today"])
    assert support_table(library()).count("no: it is off today") == 2 * len(FEATURES)


def test_version_stands_in_one_place() -> None:
    build = support.native().build
    if build is not None:
        assert build.version == prefill.__version__
