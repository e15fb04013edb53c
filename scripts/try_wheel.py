"""One wheel on every torch and Python at hand: a fresh environment for each pair, and a table.

    python scripts/try_wheel.py WHEEL [--python EXE ...] [--torch VERSION ...] [--json PATH]

In each environment pip installs the wheel beside that torch ("newest" is whatever pip takes), then,
outside the source tree: `python -m prefill info --json`, which must report the kernels;
`python -m prefill check`; and a call under torch.compile held against torch's own attention. Needs
nothing but the interpreters and pip. An environment with a CUDA torch is several GB; it is removed
before the next one is made.

Exit status: 0 if all that pip could install is right, 1 if something is wrong or nothing could be
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TORCHES = ("2.10.0", "2.11.0", "2.13.0", "newest")
COLUMNS = ("python", "torch", "kernels", "check", "call", "verdict")
INSTALL_SECONDS = 1800
RUN_SECONDS = 600

CALL = """
import torch, prefill
q, k, v = (torch.randn(n, h, 64, dtype=torch.float16) for n, h in ((33, 4), (70, 2), (70, 2)))
call = torch.compile(prefill.single_prefill_with_kv_cache, fullgraph=True, backend="aot_eager")
wide = [x.float().transpose(0, 1) for x in (q, k, v)]
right = torch.nn.functional.scaled_dot_product_attention(*wide, enable_gqa=True).transpose(0, 1)
error = (call(q, k, v).float() - right).abs().max().item()
assert error < 1e-3, f"differs from torch's attention by {error}"
"""


@dataclass(frozen=True)
class Trial:
    """What came of one environment."""

    python: str
    torch: str
    kernels: str = ""
    check: str = ""
    call: str = ""
    verdict: str = "ok"
    """"ok", "WRONG: " or "not installed: ", and the last line that said why."""

    @property
    def installed(self) -> bool:
        return not self.verdict.startswith("not installed")


def run(*command: str | Path, seconds: int, cwd: Path) -> tuple[bool, str]:
    """Whether the command succeeded, and what it printed on both channels."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
            cwd=cwd,
            env=clean,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def try_pair(wheel: Path, python: str, torch: str) -> Trial:
    """Install and run in a new environment, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as name:
        place = Path(name)
        good, said = run(python, "-m", "venv", place / "venv", seconds=300, cwd=place)
        if not good:
            return Trial(python, torch, verdict=f"not installed: {last_line(said)}")
        inside = place / "venv" / "bin" / "python"
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        # numpy: torch warns where there is none.
        good, said = run(*pip, wheel, wanted, "numpy", seconds=INSTALL_SECONDS, cwd=place)
        if not good:
            return Trial(python, torch, verdict=f"not installed: {last_line(said)}")
        return judge(inside, place, python, torch)


def judge(inside: Path, place: Path, python: str, torch: str) -> Trial:
    """Run what is installed for the interpreter `inside`."""
    good, said = run(inside, "-m", "prefill", "info", "--json", seconds=RUN_SECONDS, cwd=place)
    try:
        info = json.loads(said) if good else None
    except ValueError:
        info = None
    if info is None:
        return Trial(python, torch, verdict=f"WRONG: info: {last_line(said)}")
    versions = info["versions"]
    trial = {"python": versions["python"], "torch": versions["torch"]}
    if info["build"] is None:
        return Trial(**trial, kernels="no", verdict=f"WRONG: {info['missing']}")
    trial["kernels"] = str(len(info["build"]["kernels"]))
    good, said = run(inside, "-m", "prefill", "check", seconds=RUN_SECONDS, cwd=place)
    trial["check"] = "right" if good else "WRONG"
    if not good:
        return Trial(**trial, verdict=f"WRONG: check: {last_line(said)}")
    good, said = run(inside, "-c", CALL, seconds=RUN_SECONDS, cwd=place)
    trial["call"] = "right" if good else "WRONG"
    return Trial(**trial, verdict="ok" if good else f"WRONG: call: {last_line(said)}")


def table(trials: Sequence[Trial]) -> str:
    """As Markdown, which docs/building.md takes as it is."""
    rows = [COLUMNS, *(tuple(asdict(trial)[name] or "-" for name in COLUMNS) for trial in trials)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(COLUMNS), *lines[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Try a wheel on several torches and Pythons.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="EXE")
    parser.add_argument("--torch", nargs="+", default=list(TORCHES), metavar="VERSION")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the outcome there")
    options = parser.parse_args(arguments)
    if not options.wheel.is_file():
        parser.error(f"there is no wheel {options.wheel}; scripts/test makes one in dist/")
    wheel = options.wheel.resolve()
    trials = []
    for python in options.python:
        for torch in options.torch:
            trials.append(try_pair(wheel, python, torch))
            print(f"{python}, torch {torch}: {trials[-1].verdict}", file=sys.stderr, flush=True)
            if options.json is not None:
                told = {"wheel": wheel.name, "trials": [asdict(trial) for trial in trials]}
                options.json.write_text(json.dumps(told, indent=1) + "\n")
    print(table(trials))
    installed = [trial for trial in trials if trial.installed]
    return 0 if installed and all(trial.verdict == "ok" for trial in installed) else 1


if __name__ == "__main__":
    sys.exit(main())
