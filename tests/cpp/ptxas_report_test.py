"""The reader of ptxas's reports finds what it is for. The samples are nvcc 13.0's words."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cmake"))

from ptxas_report import NO_REPORT, SKIPPED, check, faults, keep, report_of

SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to wgmma pipeline crossing function boundary at a function call in the "
    "function 'attend'"
)
INJECTED = (
    "ptxas info    : (C7517) warpgroup.wait is injected in around line 43 by compiler to allow use "
    "of registers defined by GMMA in function 'attend'"
)
IGNORED = (
    "ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain"
    " compatibility across compilation units."
)
SPILLED = (
    "ptxas warning : Registers are spilled to local memory in function 'attend', 40 bytes spill"
    " stores, 36 bytes spill loads"
)


def statistics(arch: str, stack: int = 0, stores: int = 0, loads: int = 0, used: str = "") -> str:
    return f"""\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for '{arch}'
ptxas info    : Function properties for attend
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers{used}
ptxas info    : Compile time = 6.822 ms
"""


CLEAN = statistics("sm_80") + statistics("sm_90")
ARCHS = ["sm_80", "sm_90"]


class FaultsTest(unittest.TestCase):
    def assert_one_fault(self, text: str, *words: str) -> None:
        found = faults(text, ARCHS)
        assert len(found) == 1, found
        assert all(word in found[0] for word in words), found

    def test_clean(self) -> None:
        assert faults(CLEAN, ARCHS) == []
        warnings = "launch.cuh:12:3: warning: unused variable\n   12 | int x;\n"
        assert faults(warnings + CLEAN, ARCHS) == []

    def test_memory(self) -> None:
        for faulty in (
            statistics("sm_90", stack=40),
            statistics("sm_90", stores=4),
            statistics("sm_90", loads=4),
            statistics("sm_90", used=", 8 bytes cumulative stack size"),
        ):
            self.assert_one_fault(statistics("sm_80") + faulty, "sm_90: line 1", "'attend'")

    def test_memory_of_a_called_function(self) -> None:
        called = "ptxas info    : Function properties for helper\n    8 bytes stack frame, "
        called += "0 bytes spill stores, 0 bytes spill loads\n"
        self.assert_one_fault(CLEAN + called, "sm_90: line 14", "8 bytes stack frame", "'helper'")

    def test_notices(self) -> None:
        for notice in (SERIALISED, INJECTED, IGNORED, SPILLED, "ptxas info    : (C9999) New"):
            text = statistics("sm_80") + notice + "\n" + statistics("sm_90")
            self.assert_one_fault(text, f"sm_90: line 7: {notice}")
            self.assert_one_fault(notice + "\n" + CLEAN, f"sm_80: line 1: {notice}")
            self.assert_one_fault(CLEAN + notice, f"line 13: {notice}")

    def test_kernel_that_is_not_told_of(self) -> None:
        self.assert_one_fault("", "expected for each of sm_80 sm_90; reported: none")
        self.assert_one_fault(statistics("sm_80"), "reported: 1 for sm_80")
        self.assert_one_fault(CLEAN + statistics("sm_90"), "reported: 1 for sm_80, 2 for sm_90")

    def test_memory_that_is_not_told_of(self) -> None:
        text = CLEAN.replace("bytes stack frame", "bytes of stack", 1)
        self.assert_one_fault(text, "sm_80: attend without a line on its stack and spills")


class FilesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.object = str(Path(folder.name) / "kernel.cu.o")

    def compile(self, text: str, code: int = 0) -> str:
        """Runs a compiler that says the text; returns what the user sees."""
        script = f"import sys; sys.stderr.write({text!r}); sys.exit({code})"
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            assert keep([sys.executable, "-c", script, "-o", self.object]) == code
        return shown.getvalue()

    def check(self, archs: list[str], objects: list[str]) -> tuple[int, str]:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            return check(archs, objects), said.getvalue()

    def test_keep(self) -> None:
        assert self.compile(f"{SERIALISED}\n{CLEAN}") == f"{SERIALISED}\n"
        assert report_of(self.object).read_text() == f"{SERIALISED}\n{CLEAN}"
        assert self.compile("error: no\n", code=2) == "error: no\n"
        assert not report_of(self.object).exists()

    def test_check(self) -> None:
        archs = ["80-real", "90-real", "80-virtual"]
        self.compile(CLEAN)
        assert self.check(archs, [self.object])[0] == 0
        assert self.check(archs, [])[0] == 1
        assert self.check(["80-virtual"], [self.object])[0] == SKIPPED
        self.compile(SERIALISED + "\n" + CLEAN)
        code, said = self.check(archs, [self.object])
        assert code == 1
        assert f"FAILED: kernel, {report_of(self.object)}\n    sm_80: line 1: {SERIALISED}" in said

    def test_check_without_a_report(self) -> None:
        assert self.check(["80-real"], [self.object])[0] == 1
        report_of(self.object).touch()
        code, said = self.check(["80-real"], [self.object])
        assert code == 1
        assert f"FAILED: kernel, {report_of(self.object)}\n    {NO_REPORT}" in said


if __name__ == "__main__":
    unittest.main()
