"""What is printed and written: the JSON's parts, plain-text tables, a plot.

A case's `results` map a contender to {"refused": why}, {"wrong": how} or, by regime, statistics in
seconds per call with `tflops` of the median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefill.bench.cases import Case, length_text
from prefill.bench.contenders import RATIOS
from prefill.bench.timing import Samples, statistics
from prefill.text import table

FORMAT = 1


def case_result(
    case: Case,
    sets: int,
    samples: Mapping[str, Mapping[str, Samples]],
    refused: Mapping[str, str],
    wrong: Mapping[str, str],
) -> dict[str, Any]:
    """One case for the JSON."""
    results: dict[str, Any] = {name: {"refused": reason} for name, reason in refused.items()}
    results |= {name: {"wrong": problem} for name, problem in wrong.items()}
    for name, by_regime in samples.items():
        results[name] = {}
        for regime, kept in by_regime.items():
            seconds = statistics(kept.seconds)
            results[name][regime] = seconds._asdict() | {
                "tflops": case.flop / seconds.median / 1e12
            }
            if kept.clocks:
                results[name][regime]["sm_clock_mhz"] = statistics(kept.clocks).median
    regimes = sorted({regime for by_regime in samples.values() for regime in by_regime})
    return case.describe() | {
        "input_sets": sets,
        "results": results,
        "ratios": {regime: ratios(results, regime) for regime in regimes},
    }


def ratios(results: Mapping[str, Any], regime: str) -> dict[str, float]:
    """How many times as fast, by the medians, for each of `RATIOS` that both sides ran."""
    found = {}
    for name, (ours, peer) in RATIOS.items():
        ran = [each for each in ours if regime in results.get(each, {})]
        if ran and regime in results.get(peer, {}):
            mine, theirs = (results[each][regime]["median"] for each in (ran[0], peer))
            found[name] = theirs / mine
    return found


def result_table(cases: Sequence[Mapping[str, Any]], names: Sequence[str], regime: str) -> str:
    """One line per case, one column per contender, then the ratios and their geometric means."""
    rows = [_row(case, names, regime) for case in cases]
    means = ["geometric mean", *[""] * len(names)]
    for ratio in RATIOS:
        found = [case["ratios"].get(regime, {}).get(ratio) for case in cases]
        values = [value for value in found if value is not None]
        means.append(f"{geometric_mean(values):.3f}" if values else "-")
    headers = ["case", *names, *RATIOS]
    return _aligned(headers, [*rows, means] if len(rows) > 1 else rows)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def progress(case: Mapping[str, Any], regime: str) -> str:
    """The case in one line."""
    cells = [f"{name} {_cell(case, name, regime)}" for name in case["results"]]
    cells += [f"{ratio} {value:.2f}" for ratio, value in case["ratios"].get(regime, {}).items()]
    return f"{case['name']}, {regime}: {', '.join(cells)}"


def remarks(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a contender has no figure, each reason once with the cases it holds for."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        for name, result in case["results"].items():
            for kind in ("refused", "wrong"):
                if kind in result:
                    reasons.setdefault(f"{name}: {kind}: {result[kind]}", []).append(case["name"])
    lines = []
    for reason, names in reasons.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"{reason} ({', '.join(names[:2])}{more})")
    return lines


def any_wrong(cases: Sequence[Mapping[str, Any]]) -> bool:
    return any("wrong" in result for case in cases for result in case["results"].values())


def host_table(host: Mapping[str, Any]) -> str:
    rows = []
    for name, result in host.items():
        values = [result.get(key) for key in ("median", "low", "high")]
        rows.append([name, *("-" if value is None else f"{value * 1e6:.2f}" for value in values)])
    return _aligned(["us per call", "median", "quartile", "quartile"], rows)


def require_matplotlib() -> str:
    """Why no plot can be made; "" if one can."""
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        return "--plot needs matplotlib, which is not installed: pip install 'prefill[bench]'"
    return ""


def plot(cases: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path, title: str) -> None:
    """A row of panels per regime: TFLOP/s over length for each kind of case."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        dims = f"d{case['head_dim_qk']}/{case['head_dim_vo']}"
        kinds.setdefault(f"{case['dtype']} {dims} {case['variant']}", []).append(case)
    regimes = sorted({regime for case in cases for regime in case["ratios"]})
    if not regimes:
        return
    size = (4.5 * len(kinds), 3.8 * len(regimes))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(regimes), len(kinds), squeeze=False, sharey=True)
    for line, regime in zip(panels, regimes, strict=True):
        for panel, (kind, members) in zip(line, kinds.items(), strict=True):
            for name in names:
                ran = [case for case in members if regime in case["results"].get(name, {})]
                speeds = [case["results"][name][regime]["tflops"] for case in ran]
                lengths = [case["kv_len"] for case in ran]
                panel.plot(lengths, speeds, marker="o", label=name)
            lengths = sorted({case["kv_len"] for case in members})
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [length_text(length) for length in lengths])
            panel.set_title(f"{kind}, {regime}")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("TFLOP/s")
        line[0].legend()
    figure.savefig(path)


def _row(case: Mapping[str, Any], names: Sequence[str], regime: str) -> list[str]:
    found = case["ratios"].get(regime, {})
    ratio_cells = [f"{found[ratio]:.2f}" if ratio in found else "-" for ratio in RATIOS]
    return [case["name"], *(_cell(case, name, regime) for name in names), *ratio_cells]


def _cell(case: Mapping[str, Any], name: str, regime: str) -> str:
    result = case["results"].get(name, {})
    if "wrong" in result:
        return "WRONG"
    if regime not in result:
        return "-"
    if case["unit"] == "us":
        return f"{result[regime]['median'] * 1e6:.1f}"
    return f"{result[regime]['tflops']:.0f}"


def _aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns, but for the first, are aligned right."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]

    def pad(row: Sequence[str]) -> list[str]:
        return [row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]  # noqa: B905

    return table(pad(headers), [pad(row) for row in rows])
