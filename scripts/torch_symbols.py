"""What a torch exports of its stable C interface: writes tests/python/torch_2_10_symbols.txt.

    pip download --no-deps torch==2.10.0 && python scripts/torch_symbols.py torch-2.10.0-*.whl

A name counts if the headers of the interface declare it and a library of the wheel exports it.
`test_binary.py` holds what the built library imports against the list, whatever torch it was built
with. Needs pyelftools (the `test` extra).
"""

from __future__ import annotations

import argparse
import io
import re
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

HEADERS = (
    "torch/include/torch/csrc/stable/c/shim.h",
    "torch/include/torch/csrc/inductor/aoti_torch/c/shim.h",
)
# The second one is in builds for CUDA alone.
LIBRARIES = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_cuda.so")
DECLARED = re.compile(r"\b((?:aoti_)?torch_\w+)\(")


def stable_symbols(wheel: Path) -> list[str]:
    declared: set[str] = set()
    exported: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for header in HEADERS:
            declared.update(DECLARED.findall(archive.read(header).decode()))
        for library in LIBRARIES:
            exported |= exports(archive.read(library))
    return sorted(declared & exported)


def exports(library: bytes) -> set[str]:
    """Names of the defined dynamic symbols."""
    section = ELFFile(io.BytesIO(library)).get_section_by_name(".dynsym")
    assert isinstance(section, SymbolTableSection)
    symbols = section.iter_symbols()
    return {symbol.name for symbol in symbols if symbol.entry.st_shndx != "SHN_UNDEF"}


def main() -> None:
    parser = argparse.ArgumentParser(description="List the stable C interface of a torch wheel.")
    parser.add_argument("wheel", type=Path, help="a torch for CUDA: it has both libraries")
    wheel = parser.parse_args().wheel
    version = wheel.name.split("-")[1]
    print(f"# Of torch {version}, by scripts/torch_symbols.py: declared in torch's stable C")
    print("# headers and exported by libtorch_cpu.so or libtorch_cuda.so.")
    print("\n".join(stable_symbols(wheel)))


if __name__ == "__main__":
    main()
