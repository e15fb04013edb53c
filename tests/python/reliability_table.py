"""The tables of recorded runs in docs/reliability.md, from the summaries of `scripts/nightly`.

    python tests/python/reliability_table.py build/nightly [COMMIT]

writes what the folder has, in folders below it too, between the page's marks: runs on a GPU to one
table, runs without to the other. Summaries of pieces that ran apart add up. A table that there are
no summaries for stays as it is. Without a folder it says what the page holds.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
ON_GPU, WITHOUT_GPU = "runs", "runs without a GPU"
SANITIZER_RUNS = {
    "float64": "sanitizer's set against float64",
    "memcheck": "memcheck",
    "memcheck-fuzz": "memcheck, random calls",
    "racecheck": "racecheck",
    "synccheck": "synccheck",
    "initcheck-fa2": "initcheck, fa2",
    "initcheck-fa3": "initcheck, fa3",
}
Row = tuple[str, str, str, str]
"""What, how much of it, in what time, what was wrong."""
Summaries = Sequence[dict[str, Any]]


def fuzz_rows(summaries: Summaries) -> list[Row]:
    return [fuzz_row(summary) for summary in summaries]


def fuzz_row(summary: dict[str, Any]) -> Row:
    outcomes = summary["outcomes"]
    ran = ", ".join(f"{count:,} on {name}" for name, count in sorted(summary["ran_on"].items()))
    others = (
        f"{outcomes.get('refused', 0):,} refused, {outcomes.get('rejected', 0):,} malformed ones "
        "rejected"
    )
    text = f"{summary['cases']:,} cases of seed {summary['seed']}: {ran}; {others}"
    return "fuzzing", text, seconds(summary["seconds"]), wrong(len(summary["failures"]))


def big_rows(summaries: Summaries) -> list[Row]:
    rows = [row for summary in summaries for row in summary["cases"]]
    text = f"{len(rows)} cases{on(rows)}, {sum(row['figures'] for row in rows):,} figures"
    failed = sum(bool(row["wrong"]) for row in rows)
    time = seconds(sum(row["seconds"] for row in rows))
    return [("large sizes", text, time, wrong(failed)), *stopped("large sizes", summaries)]


def soak_rows(summaries: Summaries) -> list[Row]:
    by_check = defaultdict(list)
    for summary in summaries:
        for row in summary["checks"]:
            by_check[row["check"]].append(row)
    rows = [
        (
            f"soak: {check.replace('_', ' ')}",
            rows[0]["note"] or f"{sum(r['compared'] for r in rows):,} results compared{on(rows)}",
            seconds(sum(r["seconds"] for r in rows)),
            wrong(sum(len(r["wrong"]) for r in rows)),
        )
        for check, rows in by_check.items()
    ]
    return [*rows, *stopped("soak", summaries)]


def sanitizer_rows(summaries: Summaries) -> list[Row]:
    order = list(SANITIZER_RUNS)
    return [sanitizer_row(s) for s in sorted(summaries, key=lambda s: order.index(s["run"]))]


def sanitizer_row(summary: dict[str, Any]) -> Row:
    text = f"{summary['calls']:,} calls, {summary['kernels']} kernels"
    failed = max(1, summary["reports"]) if summary["failed"] else 0
    return SANITIZER_RUNS[summary["run"]], text, seconds(summary["seconds"]), wrong(failed)


def on(rows: Sequence[dict[str, Any]]) -> str:
    return f" on {' and '.join(sorted({row['backend'] for row in rows}))}"


def stopped(name: str, summaries: Summaries) -> list[Row]:
    """A row for runs that did not come to their end."""
    missing = sum(summary["missing"] for summary in summaries)
    return [(name, f"stopped: {missing} not reached", "", "**not finished**")] if missing else []


def seconds(number: float) -> str:
    return f"{number:,.0f} s"


def wrong(count: int) -> str:
    return f"**{count}**" if count else "none"


ROWS = {"fuzz": fuzz_rows, "big": big_rows, "soak": soak_rows, "sanitizer": sanitizer_rows}


def kind_of(path: Path) -> str | None:
    """Which program a summary is of, by its name; None for other files."""
    if path.stem in SANITIZER_RUNS:
        return "sanitizer"
    kind = path.stem.partition("-")[0]
    return kind if kind in ROWS else None


def table(summaries: dict[str, list[dict[str, Any]]], commit: str) -> str:
    """Markdown of summaries by kind."""
    lines, machines = [], []
    for kind, rows_of in ROWS.items():
        if kind in summaries:
            machines += [f"{s['device']}, torch {s['torch']}" for s in summaries[kind]]
            lines += [f"| {' | '.join(row)} |" for row in rows_of(summaries[kind])]
    head = ["| run | extent | time | failures |", "| --- | --- | --- | --- |"]
    where = "; ".join(dict.fromkeys(machines)) + (f", commit {commit}" if commit else "")
    return f"{where}:\n\n" + "\n".join([*head, *lines]) + "\n"


def tables(folder: Path, commit: str) -> dict[str, str]:
    """The tables that the folder has summaries for, by the name of their marks."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(folder.rglob("*.json")):
        kind = kind_of(path)
        if kind is not None:
            summary = json.loads(path.read_text())
            place = WITHOUT_GPU if summary["device"] == "cpu" else ON_GPU
            found.setdefault(place, {}).setdefault(kind, []).append(summary)
    return {place: table(summaries, commit) for place, summaries in found.items()}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def replaced(page: str, name: str, content: str) -> str:
    begin, end = marks(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + content + end + after


def held(page: str, name: str) -> str:
    begin, end = marks(name)
    return page.partition(begin)[2].partition(end)[0]


def main(given: list[str]) -> int:
    if given:
        made = tables(Path(given[0]), "".join(given[1:2]))
        if not made:
            print(f"no summary of scripts/nightly in {given[0]}", file=sys.stderr)
            return 1
        page = PAGE.read_text()
        for name, content in made.items():
            page = replaced(page, name, content)
        PAGE.write_text(page)
    print("\n".join(held(PAGE.read_text(), name) for name in (ON_GPU, WITHOUT_GPU)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
