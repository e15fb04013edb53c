"""Plain-text tables as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns side by side; the last one wraps where the line would be longer than `width`."""
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns
    every = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(headers))]
    room = max(24, width - sum(widths[:-1]) - 2 * (len(headers) - 1))
    widths[-1] = min(widths[-1], room)
    lines = []
    for number, row in enumerate(every):
        parts = textwrap.wrap(row[-1], widths[-1]) or [""]
        for part_number, part in enumerate(parts):
            left = row[:-1] if part_number == 0 else [""] * (len(row) - 1)
            cells = [cell.ljust(size) for cell, size in zip(left, widths, strict=False)]
            lines.append("  ".join([*cells, part]).rstrip())
        if number == 0:
            lines.append("  ".join("-" * size for size in widths))
    return "\n".join(lines)
