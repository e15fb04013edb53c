"""The line that says how far long work is."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from prefill import progress
from prefill.progress import CLEAR, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock: its last value is now."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[-1])
    monkeypatch.setenv("COLUMNS", "80")
    return clock


def test_on_a_terminal(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    shown = Progress(4, terminal)
    shown.step("first")
    seconds.append(45.0)
    shown.say("first: 3 us")
    shown.step("second")
    shown.done()
    assert terminal.getvalue().split(CLEAR)[1:] == [
        "[....................] 1/4 first",
        "",
        "[#####...............] 2/4, about 2:15 left: second",
        "",
    ]
    assert capsys.readouterr() == ("first: 3 us\n", "")


@pytest.mark.usefixtures("seconds")
def test_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    Progress(4, terminal).step("a very long name of a case, longer than the line")
    assert len(terminal.getvalue().removeprefix(CLEAR)) == 39


def test_silent_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    shown = Progress(2, stream)
    shown.step("one")
    shown.say("result")
    shown.step("two")
    shown.done()
    assert stream.getvalue() == ""
    assert capsys.readouterr() == ("result\n", "")


def test_no_steps_at_all() -> None:
    terminal = Terminal()
    Progress(0, terminal).done()
    assert terminal.getvalue() == CLEAR


def test_check_shows_it() -> None:
    """On stderr that is a terminal; stdout has no trace of it."""
    reader, writer = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "prefill", "check", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        check=True,
    )
    os.close(writer)
    shown = os.read(reader, 1 << 16)
    os.close(reader)
    assert b"1/4 reference float16 64x64" in shown
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("checking on cpu\nreference float16 64x64: ok (")
