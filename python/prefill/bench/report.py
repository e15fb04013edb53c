"""What is printed and written: the JSON's parts, plain-text tables.

A case's `results` map a contender to {"refused": why}, {"wrong": how} or, by regime, statistics in
seconds per call with `tflops` of the median. Its `multiplies_in` maps those that ran to the dtype
of their products, which tells float8 that is widened from float8 that is not.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from prefill.bench.cases import Case
from prefill.bench.contenders import OURS, RATIOS
from prefill.bench.timing import Samples, statistics
from prefill.text import table

FORMAT = 1


def case_result(
    case: Case,
    sets: int,
    samples: Mapping[str, Mapping[str, Samples]],
    refused: Mapping[str, str],
    wrong: Mapping[str, str],
    dtypes: Mapping[str, str],
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
        "multiplies_in": dict(dtypes),
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


def to_plain(
    case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], regime: str
) -> dict[str, float]:
    """Each contender's TFLOP/s over its own in the case's baseline, where it ran both."""
    found = {}
    for plain in cases:
        if plain["name"] == case.get("baseline"):
            for name, result in case["results"].items():
                base = plain["results"].get(name, {})
                if regime in result and regime in base:
                    found[name] = result[regime]["tflops"] / base[regime]["tflops"]
    return found


def result_table(cases: Sequence[Mapping[str, Any]], names: Sequence[str], regime: str) -> str:
    """One line per case, one column per contender, then the ratios and their geometric means."""
    return _aligned(*_columns(cases, names, regime))


def markdown_table(cases: Sequence[Mapping[str, Any]], names: Sequence[str], regime: str) -> str:
    """The same for a document."""
    headers, rows = _columns(cases, names, regime)
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns(
    cases: Sequence[Mapping[str, Any]], names: Sequence[str], regime: str
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table, with the ratios of contenders that are in it.

    It has columns "/plain" where cases have baselines.
    """
    shown = [
        name
        for name, (ours, peer) in RATIOS.items()
        if peer in names and any(each in names for each in ours)
    ]
    compared = any(case.get("baseline") for case in cases)
    plain = [name for name in OURS if compared and name in names]
    rows, every = [], []
    for case in cases:
        own = to_plain(case, cases, regime)
        found = ratios(case["results"], regime)
        ratio_values = [*(found.get(r) for r in shown), *(own.get(name) for name in plain)]
        ratio_cells = ["-" if value is None else f"{value:.2f}" for value in ratio_values]
        rows.append([case["name"], *(_cell(case, name, regime) for name in names), *ratio_cells])
        every.append(ratio_values)
    if len(rows) > 1:
        means = []
        for column in zip(*every, strict=True):
            values = [value for value in column if value is not None]
            means.append(f"{geometric_mean(values):.3f}" if values else "-")
        rows.append(["geometric mean", *[""] * len(names), *means])
    return ["case", *names, *shown, *(f"{name}/plain" for name in plain)], rows


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def progress(case: Mapping[str, Any], regime: str) -> str:
    """The case in one line."""
    cells = [f"{name} {_cell(case, name, regime)}" for name in case["results"]]
    cells += [f"{ratio} {value:.2f}" for ratio, value in case["ratios"].get(regime, {}).items()]
    return f"{case['name']}, {regime}: {', '.join(cells)}"


def remarks(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a contender has no figure, and what it multiplies float8 in.

    Each once, with the cases it holds for.
    """
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if case.get("float8"):
            for name, dtype in case.get("multiplies_in", {}).items():
                told = f"{name}: multiplies {case['float8']} of float8 in {dtype}"
                reasons.setdefault(told, []).append(case["name"])
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
    """A table whose columns, but for the first, are aligned right.

    Where that is wider than the terminal, the columns come in several tables, the first in each.
    """
    every = [headers, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(headers))]
    room = shutil.get_terminal_size((100, 24)).columns - widths[0]
    groups: list[list[int]] = [[]]
    for column, width in enumerate(widths[1:], 1):
        if groups[-1] and sum(widths[each] + 2 for each in groups[-1]) + width + 2 > room:
            groups.append([])
        groups[-1].append(column)

    def part(row: Sequence[str], group: Sequence[int]) -> list[str]:
        return [row[0], *(row[column].rjust(widths[column]) for column in group)]

    return "\n\n".join(
        table(part(headers, group), [part(row, group) for row in rows]) for group in groups
    )
