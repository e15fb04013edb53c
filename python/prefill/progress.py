"""A line at the foot of a terminal that says how far long work is.

It goes to stderr, and only where that is a terminal: what is printed, piped or written as JSON has
no trace of it.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

BAR = 20
CLEAR = "\r\x1b[K"


class Progress:
    """Counts the steps of work whose number is known; `done` takes the line away."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        """Count to `total` on `stream`, by default stderr; where it is no terminal, silently."""
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._total = total
        self._number = -1
        self._began = time.monotonic()

    def step(self, what: str) -> None:
        """The next step begins: `what`."""
        self._number += 1
        if not self._shown:
            return
        full = BAR * self._number // max(self._total, 1)
        text = f"[{'#' * full}{'.' * (BAR - full)}] {self._number + 1}/{self._total}"
        text += f"{self._left()} {what}"
        columns = shutil.get_terminal_size().columns
        self._write(text[: columns - 1])

    def say(self, line: str) -> None:
        """Print a line of results to stdout, above the progress."""
        if self._shown:
            self._write("")
        print(line, flush=True)

    def done(self) -> None:
        if self._shown:
            self._write("")

    def _left(self) -> str:
        """What is still to come, if it goes on at the pace so far."""
        if self._number < 1:
            return ""
        pace = (time.monotonic() - self._began) / self._number
        seconds = round(pace * (self._total - self._number))
        return f", about {seconds // 60}:{seconds % 60:02d} left:"

    def _write(self, text: str) -> None:
        self._stream.write(CLEAR + text)
        self._stream.flush()
