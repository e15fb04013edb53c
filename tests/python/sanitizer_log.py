"""What a run of `sanitizer_set.py` said, as a summary: `scripts/sanitize` asks it of each log.

    python tests/python/sanitizer_log.py LOG RUN --code CODE --seconds SECONDS --json PATH

LOG is what the set printed, and compute-sanitizer around it; CODE its exit status. RUN is the tool,
perhaps with what it looks at: `initcheck-fa3`. A run is clean if the set ran to its end, nothing is
reported and CODE is 0. Exits with 1 if it is not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WITHOUT_SANITIZER = "float64"
"""The run that compares results instead."""
COUNTED = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)


@dataclass(frozen=True)
class Summary:
    run: str
    seconds: float
    device: str = "unknown"
    torch: str = "unknown"
    kernels: int = 0
    calls: int = 0
    reports: int = 0
    """Errors, hazards or wrong results."""
    failed: str = ""
    """Why the run is not clean."""

    @property
    def verdict(self) -> str:
        return f"FAILED: {self.failed}" if self.failed else "clean"


def last_answer(text: str) -> dict[str, Any] | None:
    """The line that the set ends with."""
    lines = [line for line in text.splitlines() if line.startswith('{"kernels"')]
    return json.loads(lines[-1]) if lines else None


def summary_of(text: str, run: str, code: int, seconds: float) -> Summary:
    answer = last_answer(text)
    if answer is None:
        return Summary(run, seconds, failed=f"it ended with {code} before its calls did")
    there = {"device": answer["device"], "torch": answer["torch"]}
    done = {"kernels": len(answer["kernels"]), "calls": answer["calls"]}
    if run == WITHOUT_SANITIZER:
        wrong = answer["wrong"]
        failed = "; ".join(wrong) if wrong else f"it ended with {code}" if code else ""
        return Summary(run, seconds, **there, **done, reports=len(wrong), failed=failed)
    counts = [int(errors or hazards) for errors, hazards in COUNTED.findall(text)]
    if not counts:
        failed = f"it ended with {code} and has no summary of compute-sanitizer's"
        return Summary(run, seconds, **there, **done, failed=failed)
    reports = sum(counts)
    failed = f"{reports} reports, exit status {code}" if reports or code else ""
    return Summary(run, seconds, **there, **done, reports=reports, failed=failed)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("run")
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(given)
    text = args.log.read_text(errors="replace")
    summary = summary_of(text, args.run, args.code, args.seconds)
    args.json.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    print(
        f"{summary.run}: {summary.verdict}; {summary.kernels} kernels, {summary.calls} calls, "
        f"{summary.reports} reports, {summary.seconds:.0f} s"
    )
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
