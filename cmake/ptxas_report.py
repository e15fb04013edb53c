"""ptxas's report on each kernel object: kept by the build, read by a test.

Spills, stack frames and serialised WGMMAs stop no build. The last are a line of mere "info", which
ptxas's -Werror lets pass. Hence:

    ptxas_report.py keep COMPILER ...
        A compiler launcher. Writes what the compiler says to <object>.ptxas and shows the user all
        of it but the statistics, which `ptxas -v` prints for every kernel.
    ptxas_report.py check ARCH,... OBJECT ...
        The test: names each fault in the reports of these objects, each of which should hold the
        same kernels for each arch (as in CUDA_ARCHITECTURES).

Of what ptxas says only the statistics are known by their wording; every other line is a fault. So
a notice that is worded in a new way is one too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SKIPPED = 77  # as in check.h
NO_REPORT = "no report, or an empty one: remove the object and build again"

STATISTICS = re.compile(
    r"ptxas info +: (Compiling entry function '(?P<entry>[^']+)' for '(?P<arch>\w+)'"
    r"|Function properties for (?P<function>\S+)"
    r"|Used \d+ registers|\d+ bytes gmem|Compile time = )"
    r"|    (?P<memory>\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads)"
)
LOCAL_MEMORY = re.compile(r"\b[1-9]\d* bytes (stack|spill|lmem|cumulative stack)")


def report_of(an_object: str) -> Path:
    return Path(an_object + ".ptxas")


def keep(command: Sequence[str]) -> int:
    report = report_of(command[command.index("-o") + 1])
    report.unlink(missing_ok=True)
    compiler = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    text = compiler.stderr.decode(errors="replace")
    for line in text.splitlines():
        if not STATISTICS.match(line):
            print(line, file=sys.stderr)
    if compiler.returncode == 0:
        report.write_text(text, encoding="utf-8")
    return compiler.returncode


def faults(text: str, archs: Sequence[str]) -> list[str]:
    """What is wrong with a report that should tell of the same kernels for each of the archs."""
    found: list[str] = []
    entries: dict[str, list[str]] = {}  # of each arch
    notices: list[str] = []  # ptxas gives its notices ahead of the statistics, which name the arch
    unmeasured: set[str] = set()  # entry functions whose memory has not been told
    arch = function = ""
    for number, line in enumerate(text.splitlines(), 1):
        match = STATISTICS.match(line)
        if match is None:
            if line.startswith("ptxas"):
                notices.append(f"line {number}: {line}")
            continue
        if match["entry"]:
            arch = match["arch"]
            entries.setdefault(arch, []).append(match["entry"])
            unmeasured.add(f"{arch}: {match['entry']}")
            found += [f"{arch}: {notice}" for notice in notices]
            notices.clear()
        elif match["function"]:
            function = match["function"]
        elif match["memory"]:
            unmeasured.discard(f"{arch}: {function}")
        if LOCAL_MEMORY.search(line):
            found.append(f"{arch}: line {number}: {line.strip()} (function '{function}')")
    found += [f"no arch: {notice}" for notice in notices]
    found += [f"{kernel} without a line on its stack and spills" for kernel in sorted(unmeasured)]
    expected = sorted(entries.get(archs[0], []))
    same = all(sorted(entries.get(arch, [])) == expected for arch in archs)
    if not expected or not same or set(entries) != set(archs):
        counts = ", ".join(f"{len(entries[arch])} for {arch}" for arch in sorted(entries)) or "none"
        wanted = " ".join(sorted(archs))
        found.append(f"the same kernels expected for each of {wanted}; reported: {counts}")
    return found


def check(cmake_archs: Sequence[str], objects: Sequence[str]) -> int:
    archs = [f"sm_{arch.split('-')[0]}" for arch in cmake_archs if not arch.endswith("-virtual")]
    if not archs:
        print("SKIPPED: this build has PTX alone, which ptxas has not seen")
        return SKIPPED
    if not objects:
        print("FAILED: no kernel object is named")
        return 1
    count = 0
    for an_object in objects:
        report = report_of(an_object)
        kernel = Path(an_object).name.split(".")[0]
        text = report.read_text(encoding="utf-8") if report.is_file() else ""
        found = faults(text, archs) if text else [NO_REPORT]
        if found:
            print("\n    ".join([f"FAILED: {kernel}, {report}", *found]))
        count += len(found)
    print(f"ptxas on {len(objects)} kernels for {' '.join(archs)}: faults: {count}")
    return 1 if count else 0


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["keep", *command]:
            return keep(command)
        case ["check", archs, *objects]:
            return check(archs.split(","), objects)
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
