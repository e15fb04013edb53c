"""Differential fuzzing: random calls on each backend against float64 and the reference.

    python tests/python/fuzz.py --cases 20000 --seed 1 --jobs 8 --json fuzz.json

Case n of seed S is the same on every machine. Cases run in worker processes: one that crashes or
hangs is a failure of the case that it ran, and another takes over behind it. Failures are made
smaller and printed as one line for a shell. Exits with 1 if there are any.

With `--device cpu` the kernels are a stand-in that rounds as they do (`float32_kernel.py`): what is
driven is validation, the resolver, the path to the op, the reference, and what the check allows.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

from combinations import Seeded
from fuzz_cases import BACKENDS, FuzzCase, fuzz_case
from fuzz_check import Outcome, outcome, reproducer, shrunk

SMALL = {"longest": 70, "scores": 20_000}
"""Of cases on the CPU."""
FEATURES = (
    *("dtypes", "kv_layout", "mask", "position", "sinks", "o_dtype", "out", "lse", "numbers"),
    *("nan_key", "fp16_reduction", "lse_base", "layouts", "num_splits", "stray", "broken"),
)
WORST_FAILURES = ("crash", "hang")
START_S = 300
"""How long a worker may take to start, beside the time that a case may take."""


def pretend_gpu() -> None:
    """Let CPU tensors pass for those of a Hopper GPU with the full build, for this process."""
    from fakes import pretend
    from float32_kernel import Float32Kernel

    pretend(pytest.MonkeyPatch(), kind=Float32Kernel)


def numbered(seed: int, number: int, backends: tuple[str, ...], device: str) -> FuzzCase:
    limits = SMALL if device == "cpu" else {}
    return fuzz_case(Seeded(seed * 1_000_003 + number), backends, **limits)


@dataclass
class Tally:
    """What became of the cases."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    ran_on: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: FuzzCase, found: Outcome) -> None:
        self.cases += 1
        self.outcomes["failed" if found.is_failure else found.kind] += 1
        if found.kind == "refused":
            self.refusals[found.text] += 1
        elif found.kind == "passed" and case.broken is None:
            self.ran_on[found.text] += 1
            self.features.update(f"{name}: {feature(case, name)}" for name in FEATURES)

    def as_json(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "outcomes": dict(self.outcomes),
            "ran_on": dict(self.ran_on),
            "failures": self.failures,
            "refusals": dict(self.refusals.most_common()),
            "features": dict(sorted(self.features.items())),
        }


def feature(case: FuzzCase, name: str) -> str:
    """The word that cases are counted by."""
    value = getattr(case, name)
    if name == "dtypes":
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in value)
    if name == "layouts":
        return value[0] if len(set(value)) == 1 else "mixed"
    if name == "stray":
        return "none" if value is None else f"{value[1]} in {value[0]}"
    if name == "broken":
        return "none" if value is None else value[0]
    if name == "num_splits":
        return "by rule" if value == 0 else "1" if value == 1 else "several"
    return str(value)


def work(args: argparse.Namespace) -> None:
    """A worker: a JSON line for each case from `first` on, in steps."""
    if args.device == "cpu":
        torch.set_num_threads(1)
        pretend_gpu()
    shrinks = args.shrink
    print(json.dumps({"ready": True}), flush=True)
    for number in range(args.first, args.cases, args.step):
        case = numbered(args.seed, number, args.backends, args.device)
        found = outcome(case, args.device)
        line: dict[str, Any] = {"number": number, "kind": found.kind, "text": found.text}
        if found.is_failure:
            smallest = case
            # After a CUDA error every call of this process fails: the next worker goes on.
            lost = args.device != "cpu" and found.kind != "wrong" and not device_is_well()
            if shrinks and not lost:
                shrinks -= 1
                smallest = shrunk(case, lambda c, kind=found.kind: fails(c, args.device, kind))
            line |= {"smallest": reproducer(smallest, args.device), "lost": lost}
        print(json.dumps(line), flush=True)
        if line.get("lost"):
            sys.exit(1)


def fails(case: FuzzCase, device: str, kind: str) -> bool:
    return outcome(case, device).kind == kind


def device_is_well() -> bool:
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError:
        return False
    return True


@dataclass
class Worker:
    """A process that runs every `step`th case, and the one after it where it dies."""

    args: argparse.Namespace
    first: int
    found: queue.Queue[dict[str, Any] | Exception]

    def follow(self) -> None:
        """Put a line into the queue for each case, whatever happens to the process.

        What goes wrong here comes in the place of a line: the run would wait for it for ever.
        """
        number = self.first
        try:
            while number < self.args.cases:
                number = self._one_process(number)
        except Exception as error:
            self.found.put(error)

    def _one_process(self, first: int) -> int:
        """Returns the first case that is not done."""
        given = ["--worker", "--first", str(first), "--step", str(self.args.jobs)]
        command = [sys.executable, __file__, *given, *self.args.given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
            try:
                return self._answers(process, first)
            except Exception:
                process.kill()  # the end of the block waits for it
                raise

    def _answers(self, process: subprocess.Popen[str], first: int) -> int:
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_forward, args=(process, lines), daemon=True).start()
        number, limit = first, START_S
        while number < self.args.cases:
            try:
                text = lines.get(timeout=limit)
            except queue.Empty:
                process.kill()
                return self._dead(number, "hang", f"no answer in {limit} s")
            if text is None:
                code = process.wait()
                return self._dead(number, "crash", f"the process ended with {code}")
            line = _answer(text)
            if line is None:
                continue
            limit = self.args.limit
            if "number" not in line:
                continue
            self.found.put(line)
            number = line["number"] + self.args.jobs
            if line.get("lost"):
                break
        return number

    def _dead(self, number: int, kind: str, text: str) -> int:
        self.found.put({"number": number, "kind": kind, "text": text})
        return number + self.args.jobs


def _answer(text: str) -> dict[str, Any] | None:
    """A worker's line; None for what a library printed there."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) else None


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def fuzz(args: argparse.Namespace) -> Tally:
    """Run all cases in `args.jobs` processes."""
    found: queue.Queue[dict[str, Any] | Exception] = queue.Queue()
    for first in range(args.jobs):
        worker = Worker(args, first, found)
        threading.Thread(target=worker.follow, daemon=True).start()
    tally, start = Tally(), time.monotonic()
    told = start
    for done in range(1, args.cases + 1):
        line = found.get()
        if isinstance(line, Exception):
            raise RuntimeError("a worker cannot be followed any more") from line
        case = numbered(args.seed, line["number"], args.backends, args.device)
        result = Outcome(line["kind"], line["text"])
        tally.add(case, result)
        if result.is_failure:
            failure = {
                "number": line["number"],
                "kind": result.kind,
                "text": result.text[:2000],
                "case": reproducer(case, args.device),
                "smallest": line.get("smallest", reproducer(case, args.device)),
            }
            if result.kind in WORST_FAILURES and len(tally.failures) < args.shrink:
                smallest = shrunk(case, lambda c: dies(c, args), attempts=40)
                failure["smallest"] = reproducer(smallest, args.device)
            tally.failures.append(failure)
            print(f"FAILED, case {line['number']}, {result.kind}: {result.text[:500]}")
            print(f"  {failure['smallest']}", flush=True)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            counts = ", ".join(f"{n} {kind}" for kind, n in tally.outcomes.most_common())
            seconds = told - start
            print(f"{done} of {args.cases} cases in {seconds:.0f} s: {counts}", file=sys.stderr)
    return tally


def dies(case: FuzzCase, args: argparse.Namespace) -> bool:
    """Whether a process of its own does not survive the case, or not in time."""
    program = f"from fuzz_check import *; outcome({case!r}, {args.device!r})"
    if args.device == "cpu":
        program = f"import fuzz; fuzz.pretend_gpu(); {program}"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            timeout=START_S / 10 + args.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu (no kernels there)")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a case may take")
    parser.add_argument("--shrink", type=int, default=5, help="failures made smaller, per worker")
    parser.add_argument("--json", type=Path, help="where the summary goes, beside the screen")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.given = given
    args.backends = tuple(args.backend or BACKENDS)
    return args


def main(given: list[str]) -> int:
    args = parse(given)
    if args.worker:
        work(args)
        return 0
    start = time.monotonic()
    tally = fuzz(args)
    summary = {
        "seed": args.seed,
        "device": "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - start, 1),
        **tally.as_json(),
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps({**summary, "features": len(tally.features)}, indent=2))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
