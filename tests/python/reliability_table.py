"""The table of recorded runs in docs/reliability.md, from the summaries of `scripts/nightly`.

    python tests/python/reliability_table.py build/nightly [COMMIT]

writes it between the page's marks; without a folder it says what the page holds.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- runs: begin -->\n", "<!-- runs: end -->\n"
NO_RUNS = "No run is recorded here yet.\n"
Row = tuple[str, str, str, str]
"""What, how much of it, in what time, what was wrong."""


def fuzz_rows(summary: dict[str, Any]) -> list[Row]:
    outcomes = summary["outcomes"]
    ran = ", ".join(f"{count:,} on {name}" for name, count in sorted(summary["ran_on"].items()))
    others = (
        f"{outcomes.get('refused', 0):,} refused, {outcomes.get('rejected', 0):,} malformed ones "
        "rejected"
    )
    text = f"{summary['cases']:,} cases of seed {summary['seed']}: {ran}; {others}"
    return [("fuzzing", text, seconds(summary["seconds"]), wrong(len(summary["failures"])))]


def soak_rows(summary: dict[str, Any]) -> list[Row]:
    by_check = defaultdict(list)
    for row in summary["checks"]:
        by_check[row["check"]].append(row)
    return [
        (
            f"soak: {check.replace('_', ' ')}",
            rows[0]["note"] or f"{sum(r['compared'] for r in rows):,} results compared",
            seconds(sum(r["seconds"] for r in rows)),
            wrong(sum(len(r["wrong"]) for r in rows)),
        )
        for check, rows in by_check.items()
    ]


def big_rows(summary: dict[str, Any]) -> list[Row]:
    rows = summary["cases"]
    text = f"{len(rows)} cases, {sum(row['figures'] for row in rows):,} figures"
    failed = sum(bool(row["wrong"]) for row in rows)
    return [("large sizes", text, seconds(sum(row["seconds"] for row in rows)), wrong(failed))]


def seconds(number: float) -> str:
    return f"{number:,.0f} s"


def wrong(count: int) -> str:
    return f"**{count}**" if count else "none"


ROWS = {"fuzz": fuzz_rows, "big": big_rows, "soak": soak_rows}


def table(folder: Path, commit: str) -> str:
    """Markdown of the summaries that the folder has."""
    lines, machines = [], []
    for name, rows_of in ROWS.items():
        path = folder / f"{name}.json"
        if path.is_file():
            summary = json.loads(path.read_text())
            machines.append(f"{summary['device']}, torch {summary['torch']}")
            lines += [f"| {' | '.join(row)} |" for row in rows_of(summary)]
    if not lines:
        return NO_RUNS
    head = ["| run | extent | time | failures |", "| --- | --- | --- | --- |"]
    where = "; ".join(dict.fromkeys(machines)) + (f", commit {commit}" if commit else "")
    return f"{where}:\n\n" + "\n".join([*head, *lines]) + "\n"


def replaced(page: str, content: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + content + END + after


def held(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


def main(given: list[str]) -> None:
    page = PAGE.read_text()
    if given:
        PAGE.write_text(replaced(page, table(Path(given[0]), "".join(given[1:2]))))
    print(held(PAGE.read_text()), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
