"""What the built library holds, read from the file: instructions, archs, symbols, needed libraries.

All of it runs without a GPU. cuobjdump and nvdisasm come from PyPI (the `test` extra).
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from prefill import support
from prefill.support import LIBRARY_NAME, BuildInfo

LIBRARY = Path(str(importlib.resources.files("prefill") / LIBRARY_NAME))

pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file(), reason="this build has no kernels (PREFILL_KERNELS=OFF)"
)

NEEDED = {
    "libtorch_cpu.so",
    "libtorch.so",
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libc.so.6",
}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
OLD_GLIBC = {"libdl.so.2", "libpthread.so.0", "librt.so.1"}  # parts of libc before 2.34
TORCH_STABLE = re.compile(r"(aoti_torch|torch)_[a-z0-9_]+")
OLDEST_TORCH = Path(__file__).with_name("torch_2_10_symbols.txt")
NEWEST_VERSIONS = {  # what manylinux_2_34 allows; docs/building.md names the tag
    "GLIBC": (2, 34),
    "GLIBCXX": (3, 4, 29),
    "CXXABI": (1, 3, 13),
    "GCC": (11, 0),
}
DTYPES = {  # enum class DType
    "0": "float16",
    "1": "bfloat16",
    "2": "float8_e4m3fn",
    "3": "float8_e5m2",
}

MAIN_KERNEL = re.compile(
    r"7prefill3(?P<backend>fa\d)16attention_kernel"
    r".*DTypeE(?P<dtype>\d).*HeadDimsILi(?P<qk>\d+)ELi(?P<vo>\d+)E"
)
MUST_HAVE = {"fa2": {"HMMA", "LDGSTS"}, "fa3": {"HGMMA", "UTMALDG", "USETMAXREG"}}
IN_FLOAT8 = {"HGMMA": "QGMMA"}
LOCAL_MEMORY = {"LDL", "STL"}


@dataclass(frozen=True)
class Function:
    """One function of one embedded cubin."""

    arch: str
    name: str
    instructions: Counter[str]

    @property
    def row(self) -> tuple[str, str, int, int] | None:
        """The kernel-table row (backend, dtype, QK, VO) that a main kernel is for, else None."""
        return main_kernel_row(self.name)


def main_kernel_row(name: str) -> tuple[str, str, int, int] | None:
    match = MAIN_KERNEL.search(name)
    if match is None:
        return None
    return match["backend"], DTYPES[match["dtype"]], int(match["qk"]), int(match["vo"])


@cache
def build() -> BuildInfo:
    library = support.native()
    assert library.build is not None, library.missing
    return library.build


@cache
def tool(name: str) -> str:
    """A CUDA binary tool: of the PyPI package, else on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations if spec else None) or []:
        for path in Path(location).glob(f"cu*/bin/{name}"):
            return str(path)
    path = shutil.which(name)
    assert path is not None, f"no {name}: pip install 'prefill[test]'"
    return path


def cuobjdump(*arguments: str) -> str:
    binaries = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ["PATH"]])
    return subprocess.run(
        [tool("cuobjdump"), *arguments, str(LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": binaries},
    ).stdout


def parse_sass(lines: Iterator[str]) -> Iterator[Function]:
    arch = ""
    opcode = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
    function: Function | None = None
    for line in lines:
        if match := opcode.match(line):
            assert function is not None
            function.instructions[match[1]] += 1
        elif match := re.match(r"\s*code for (sm_\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            if function:
                yield function
            function = Function(arch, match[1], Counter())
    if function:
        yield function


@cache
def functions() -> tuple[Function, ...]:
    return tuple(parse_sass(iter(cuobjdump("-sass").splitlines())))


def main_kernels() -> list[Function]:
    return [function for function in functions() if function.row]


def archs_of(backend: str, kind: str) -> set[str]:
    """The sm_ names of the build's real or virtual archs."""
    listed = [arch.split("-") for arch in build().archs[backend]]
    return {f"sm_{number}" for number, arch_kind in listed if arch_kind == kind}


def rows_of(backend: str) -> set[tuple[str, str, int, int]]:
    return {
        (backend, kernel.dtype, kernel.head_dim_qk, kernel.head_dim_vo)
        for kernel in build().kernels_of(backend)
    }


def test_parser_reads_opcodes() -> None:
    text = """
        code for sm_90a
                Function : _ZN7prefill3fa316attention_kernelI6DTypeE1_8HeadDimsILi192ELi128EEE
        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00 */
                                                            /* 0x01 */
        /*0010*/              @!P0 STL.64 [R1], R2 ;        /* 0x02 */
        /*0020*/             @UP1 UTMALDG.3D [UR4], [UR6] ; /* 0x03 */
    """
    (function,) = parse_sass(iter(text.splitlines()))
    assert function.arch == "sm_90a"
    assert function.row == ("fa3", "bfloat16", 192, 128)
    assert function.instructions == {"LDC": 1, "STL": 1, "UTMALDG": 1}


def test_every_row_has_a_kernel_for_every_real_arch() -> None:
    for backend in build().archs:
        real = {(function.row, function.arch) for function in main_kernels()}
        real = {(row, arch) for row, arch in real if row and row[0] == backend}
        archs = archs_of(backend, "real")
        assert real == {(row, arch) for row in rows_of(backend) for arch in archs}


def test_every_row_has_ptx_for_every_virtual_arch() -> None:
    for backend in build().archs:
        for arch in archs_of(backend, "virtual"):
            text = cuobjdump("-ptx", "-arch", arch)
            entries = re.findall(r"\.entry (\w+)", text)
            rows = {main_kernel_row(entry) for entry in entries}
            assert rows_of(backend) == {row for row in rows if row and row[0] == backend}


def test_embedded_archs_are_those_of_the_build() -> None:
    elf = set(re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("--list-elf")))
    ptx = set(re.findall(r"\.(sm_\w+)\.ptx", cuobjdump("--list-ptx")))
    backends = build().archs
    assert elf == set().union(*(archs_of(backend, "real") for backend in backends))
    assert ptx == set().union(*(archs_of(backend, "virtual") for backend in backends))


def must_have(row: tuple[str, str, int, int]) -> set[str]:
    backend, dtype = row[:2]
    if not dtype.startswith("float8"):
        return MUST_HAVE[backend]
    return {IN_FLOAT8.get(name, name) for name in MUST_HAVE[backend]}


def test_what_kernels_must_have() -> None:
    assert must_have(("fa3", "bfloat16", 64, 64)) == {"HGMMA", "UTMALDG", "USETMAXREG"}
    assert must_have(("fa3", "float8_e5m2", 64, 64)) == {"QGMMA", "UTMALDG", "USETMAXREG"}


def test_kernels_use_the_instructions_they_are_for() -> None:
    missing = [
        (function.arch, function.name, sorted(lacking))
        for function in main_kernels()
        if function.row and (lacking := must_have(function.row) - set(function.instructions))
    ]
    assert not missing


def test_main_kernels_do_not_touch_local_memory() -> None:
    spilling = [
        (function.arch, function.name, {name: function.instructions[name] for name in found})
        for function in main_kernels()
        if (found := LOCAL_MEMORY & set(function.instructions))
    ]
    assert not spilling


def test_main_kernels_have_no_stack() -> None:
    usage = re.findall(r"Function (\S+):\s+(REG:.*)", cuobjdump("--dump-resource-usage"))
    main = [(name, figures) for name, figures in usage if main_kernel_row(name)]
    assert len(main) == len(main_kernels())
    with_stack = [
        (name, figures)
        for name, figures in main
        if "STACK:0 " not in figures or "LOCAL:0 " not in figures
    ]
    assert not with_stack


@cache
def dynamic_section() -> tuple[list[str], list[str]]:
    """Needed libraries, and the tags of a run path."""
    with LIBRARY.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        tags = list(section.iter_tags())
        return (
            [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"],
            [tag.entry.d_tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")],
        )


@cache
def symbols() -> tuple[list[str], list[str]]:
    """Names of defined and of undefined dynamic symbols."""
    with LIBRARY.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(section, SymbolTableSection)
        named = [symbol for symbol in section.iter_symbols() if symbol.name]
        undefined = [symbol.name for symbol in named if symbol.entry.st_shndx == "SHN_UNDEF"]
        defined = [symbol.name for symbol in named if symbol.entry.st_shndx != "SHN_UNDEF"]
        return defined, undefined


def test_needed_libraries() -> None:
    needed, run_paths = dynamic_section()
    assert {"libtorch_cpu.so", "libtorch.so"} <= set(needed)
    assert set(needed) <= NEEDED | LOADERS | OLD_GLIBC
    assert not run_paths


def test_no_symbol_is_exported() -> None:
    defined, _ = symbols()
    assert defined == []


def test_undefined_symbols() -> None:
    """Torch's stable C interface and the C and C++ runtimes; no Python, CUDA or torch C++."""
    _, undefined = symbols()
    forbidden = re.compile(r"_?Py[A-Z_]|cu[A-Z]|cuda[A-Z]|_ZNK?(2at|3c10|5torch)|nv[A-Z]")
    assert not [name for name in undefined if forbidden.match(name)]
    torch_symbols = [name for name in undefined if "torch" in name]
    assert torch_symbols
    assert not [name for name in torch_symbols if not TORCH_STABLE.fullmatch(name)]


def test_the_device_of_the_tensors_becomes_the_current_one() -> None:
    """Torch's guard is asked for, and given back: what runs on a second GPU needs both."""
    _, undefined = symbols()
    assert {"aoti_torch_create_device_guard", "aoti_torch_delete_device_guard"} <= set(undefined)


def test_torch_symbols_are_in_the_oldest_torch() -> None:
    """What torch 2.10 exports, whatever torch the library was built with."""
    lines = OLDEST_TORCH.read_text().splitlines()
    exported = {line for line in lines if not line.startswith("#")}
    assert build().torch_target == "2.10"
    _, undefined = symbols()
    assert not {name for name in undefined if "torch" in name} - exported


def test_runtime_versions_are_old_enough() -> None:
    """Of glibc, libstdc++ and libgcc: what the manylinux tag promises."""
    with LIBRARY.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".gnu.version_r")
        assert isinstance(section, GNUVerNeedSection)
        versions = {version.name for _, needed in section.iter_versions() for version in needed}
    assert any(version.startswith("GLIBC_") for version in versions)
    for version in versions:
        family, _, number = version.partition("_")
        assert tuple(int(part) for part in number.split(".")) <= NEWEST_VERSIONS[family], version


def test_segments() -> None:
    """No stack that runs code, no segment both written and run, relocations read-only after."""
    with LIBRARY.open("rb") as file:
        elf = ELFFile(file)
        flags = [(segment.header.p_type, segment.header.p_flags) for segment in elf.iter_segments()]
        section = elf.get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        tags = {tag.entry.d_tag for tag in section.iter_tags()}
    runs, written = 1, 2
    assert [flag & runs for kind, flag in flags if kind == "PT_GNU_STACK"] == [0]
    assert not [
        flag for kind, flag in flags if kind == "PT_LOAD" and flag & runs and flag & written
    ]
    assert "PT_GNU_RELRO" in {kind for kind, _ in flags}
    assert "DT_TEXTREL" not in tags


def in_subprocess(code: str) -> dict[str, object]:
    """The JSON object that a fresh interpreter prints after the code has run."""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    result: dict[str, object] = json.loads(answer.stdout.splitlines()[-1])
    return result


def test_import_loads_no_driver() -> None:
    """No context can exist where the import alone maps no driver that torch did not map."""
    code = """
import json, torch
mapped = lambda: {line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line}
before = mapped()
import prefill
print(json.dumps({
    "library": any("prefill/_kernels.so" in line for line in open("/proc/self/maps")),
    "mapped": sorted(mapped() - before),
    "initialised": torch.cuda.is_initialized(),
}))
"""
    assert in_subprocess(code) == {"library": True, "mapped": [], "initialised": False}


def test_import_is_quick() -> None:
    """Importing prefill after torch takes under 50 ms of processor time: the best of several."""
    code = """
import json, sys, time, torch
before = set(sys.modules)
start = time.process_time()
import prefill
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": len(set(sys.modules) - before)}))
"""
    runs: list[dict[str, object]] = []
    for _ in range(6):
        runs.append(in_subprocess(code))
        if float(str(runs[-1]["seconds"])) < 0.05:
            return
    pytest.fail(f"import prefill takes over 50 ms; seconds and modules imported: {runs}")
