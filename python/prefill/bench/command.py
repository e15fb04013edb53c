"""`python -m prefill bench`: its arguments, and one run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from prefill.bench import machine, plot, report, timing
from prefill.bench.cases import GRIDS, Case, expand, length_text, parse_lengths, select
from prefill.bench.contenders import Contender, available
from prefill.bench.host import host_times
from prefill.progress import Progress

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", choices=GRIDS, help="the cases: core (the default) or another")
    parser.add_argument("--lengths", metavar="LIST", help="only these of the grid, such as 512,4k")
    parser.add_argument(
        "--match",
        default="",
        help="only cases whose name holds this text, and the plain ones they are compared with",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="instead of the grid's")
    parser.add_argument("--contenders", metavar="LIST", help="only these, such as fa3,cudnn")
    parser.add_argument(
        "--regime",
        choices=(*timing.REGIMES, "both"),
        default="both",
        help="burst: 30 ms pauses; sustained: half a second of load before what is timed",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--host", action="store_true", help="host time of an eager call")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write all figures")
    parser.add_argument(
        "--plot",
        metavar="PATH",
        type=Path,
        help="draw them, as .png, .svg or .pdf (needs matplotlib)",
    )
    parser.add_argument(
        "--from-json",
        metavar="PATH",
        type=Path,
        help="measure nothing: show, as Markdown, and plot what an earlier run wrote",
    )


def run(options: argparse.Namespace) -> int:
    """Measure what the options say. 0; 1 if a contender's result is wrong; 2 if nothing can run."""
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and not path.parent.is_dir():
            return _refuse(f"{option} {path}: there is no folder {path.parent}; make it first")
    if options.plot is not None and (reason := plot.problem(options.plot)):
        return _refuse(reason)
    if options.from_json is not None:
        if idle := _of_measuring(options):
            return _refuse(f"--from-json measures nothing; leave out {', '.join(idle)}")
        return _show_written(options.from_json, options.plot)
    try:
        cases = _cases(options)
        contenders = _contenders(options)
    except ValueError as error:
        return _refuse(str(error))
    if not torch.cuda.is_available():
        why = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        return _refuse(f"it times kernels on a GPU, and torch sees no CUDA device{why}")
    device = torch.device("cuda", torch.cuda.current_device())
    regimes = timing.REGIMES if options.regime == "both" else (options.regime,)
    effort = timing.QUICK if options.quick else timing.NORMAL
    began = time.monotonic()
    results: dict[str, Any] = {
        "format": report.FORMAT,
        "grid": options.grid or "core",
        "regimes": list(regimes),
        "contenders": list(contenders),
        "effort": effort._asdict(),
        "software": machine.software(),
        "card": machine.card(device),
        "nvidia_smi": {"start": machine.nvidia_smi(device), "end": None},
        "host": None,
        "cases": [],
    }
    print(_headline(results))
    if options.host:
        results["host"] = host_times(contenders, device)
        print("\nhost time of one eager call\n" + report.host_table(results["host"]) + "\n")
        for name, result in results["host"].items():
            if "refused" in result:
                print(f"{name}: refused: {result['refused']}")
    clock = machine.SmClock(device)
    progress = Progress(len(cases))
    for number, case in enumerate(cases):
        progress.step(case.name)
        measured = _measure(case, list(contenders.values()), device, clock, regimes, effort)
        results["cases"].append(measured)
        for regime in regimes:
            count = f"[{number + 1}/{len(cases)}]"
            progress.say(f"{count} {report.progress(measured, regime)}")
        _write(results, began, options.json)  # should a later case die
    progress.done()
    results["nvidia_smi"]["end"] = machine.nvidia_smi(device)
    _write(results, began, options.json)
    _print_tables(results, report.result_table)
    _draw(results, options.plot)
    return 1 if report.any_wrong(results["cases"]) else 0


def _of_measuring(options: argparse.Namespace) -> list[str]:
    """The options given that have an effect on what is measured alone."""
    given = [
        name
        for name in ("grid", "lengths", "match", "dtype", "contenders", "quick", "host", "json")
        if getattr(options, name)
    ]
    return [f"--{name}" for name in given] + ["--regime"] * (options.regime != "both")


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.host and options.grid is None:
        return []  # host times alone, unless a grid is asked for
    dtype = getattr(torch, options.dtype) if options.dtype else None
    cases = expand(GRIDS[options.grid or "core"], dtype)
    lengths = parse_lengths(options.lengths) if options.lengths is not None else []
    chosen = select(cases, lengths, options.match)
    if not chosen:
        have = ", ".join(length_text(n) for n in sorted({case.length.kv for case in cases}))
        raise ValueError(
            f"no case of grid {options.grid or 'core'} is left; its lengths are {have}, "
            f"its cases are named like {cases[0].name!r}"
        )
    return chosen


def _contenders(options: argparse.Namespace) -> dict[str, Contender]:
    every = available()
    if options.contenders is None:
        return every
    names = options.contenders.replace(",", " ").split()
    unknown = [name for name in names if name not in every]
    if unknown or not names:
        raise ValueError(f"contenders here are {', '.join(every)}; not {options.contenders!r}")
    return {name: contender for name, contender in every.items() if name in names}


def _measure(
    case: Case,
    contenders: Sequence[Contender],
    device: torch.device,
    clock: machine.SmClock,
    regimes: Sequence[str],
    effort: timing.Effort,
) -> dict[str, Any]:
    prepared = timing.prepare(case, contenders, device, clock)
    samples = timing.measure(prepared.runners, regimes, effort)
    return report.case_result(
        case, prepared.sets, samples, prepared.refused, prepared.wrong, prepared.dtypes
    )


def _write(results: dict[str, Any], began: float, path: Path | None) -> None:
    results["seconds"] = time.monotonic() - began
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def _headline(results: dict[str, Any]) -> str:
    software, smi = results["software"], results["nvidia_smi"]["start"] or {}
    return (
        f"{results['card']['name']}, driver {smi.get('driver_version', 'unknown')}, "
        f"torch {software['torch']}, CUDA {software['cuda']}, cuDNN {software['cudnn']}, "
        f"prefill {software['commit'][:12]}"
    )


def _show_written(path: Path, picture: Path | None) -> int:
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return _refuse(f"cannot read {path}: {error}")
    if not isinstance(results, dict) or results.get("format") != report.FORMAT:
        return _refuse(f"{path} is not what --json of this version writes")
    print(_headline(results))
    _print_tables(results, report.markdown_table)
    _draw(results, picture)
    return 1 if report.any_wrong(results["cases"]) else 0


def _draw(results: dict[str, Any], path: Path | None) -> None:
    if path is not None and not plot.plot(
        results["cases"], results["contenders"], path, _headline(results)
    ):
        print(f"--plot {path}: not written, as there are no figures", file=sys.stderr)


def _print_tables(results: dict[str, Any], table: Callable[..., str]) -> None:
    cases = results["cases"]
    units = dict.fromkeys(case["unit"] for case in cases)
    for regime in results["regimes"]:
        for unit in units:
            shown = [case for case in cases if case["unit"] == unit]
            print(f"\n{regime}, median {unit} of GPU time (visible pairs, causal as half):\n")
            print(table(shown, results["contenders"], regime))
    print()
    for line in report.remarks(cases):
        print(line)
    for moment, smi in results["nvidia_smi"].items():
        if smi is not None:
            told = ", ".join(f"{key} {value}" for key, value in list(smi.items())[2:])
            print(f"nvidia-smi, {moment}: {told}")
    print(f"{results['seconds']:.0f} s")


def _refuse(reason: str) -> int:
    print(f"python -m prefill bench: {reason}", file=sys.stderr)
    return 2
