"""Pictures of a run: lines over length where cases are such a series, else a row for each case.

matplotlib is optional and imported when something is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefill.bench.cases import length_text

Cases = Sequence[Mapping[str, Any]]

LABELS = {
    "fa3": "prefill, fa3",
    "fa2": "prefill, fa2",
    "cudnn": "torch SDPA, cuDNN",
    "flash": "torch SDPA, FlashAttention-2",
    "flash4": "FlashAttention-4",
    "cudnn8": "cuDNN, float8",
    "flashinfer": "FlashInfer",
}
MARKERS = "osD^vPX"
AXES = {
    "TFLOP/s": "TFLOP/s of visible pairs (more is better)",
    "us": "microseconds of GPU time (less is better)",
}
MOST_COLUMNS = 4


def problem(path: Path) -> str:
    """Why no picture can be written to `path`; "" if one can."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return "--plot needs matplotlib, which is not installed: pip install 'prefill[bench]'"
    if path.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        return f"--plot {path}: expected a name that ends in .png, .svg or .pdf"
    return ""


def plot(cases: Cases, names: Sequence[str], path: Path, title: str) -> bool:
    """Draw the contenders `names` into a file; whether there was anything to draw."""
    figure = draw(cases, names, title)
    if figure is not None:
        figure.savefig(path)
    return figure is not None


def draw(cases: Cases, names: Sequence[str], title: str) -> Any:
    """A matplotlib figure; None where no contender ran."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    regimes = sorted({regime for case in cases for regime in case["ratios"]})
    if not regimes:
        return None
    figure = Figure(layout="constrained")
    (_draw_lengths if _is_series(cases) else _draw_cases)(figure, cases, names, regimes)
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize="medium")
    handles, labels = _legend(figure)
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _kinds(cases: Cases) -> dict[str, list[Mapping[str, Any]]]:
    """Cases that differ in length alone, by a title for them."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        qk, vo = case["head_dim_qk"], case["head_dim_vo"]
        dims = f"head dim {qk}" if qk == vo else f"head dims {qk} and {vo}"
        heads = f"{case['num_qo_heads']} query and {case['num_kv_heads']} key heads"
        kinds.setdefault(f"{dims}, {heads}\n{case['dtype']}, {case['variant']}", []).append(case)
    return kinds


def _is_series(cases: Cases) -> bool:
    """Whether each kind of case is a plain call at several lengths."""
    plain = all(
        case["unit"] == "TFLOP/s" and not case.get("baseline") and case["qo_len"] == case["kv_len"]
        for case in cases
    )
    return plain and all(len(members) > 1 for members in _kinds(cases).values())


def _draw_lengths(figure: Any, cases: Cases, names: Sequence[str], regimes: Sequence[str]) -> None:
    """A block of panels for each regime, kinds one below the other before the next column."""
    kinds = _kinds(cases)
    lines = math.ceil(len(kinds) / MOST_COLUMNS)
    columns = math.ceil(len(kinds) / lines)
    figure.set_size_inches(4.5 * columns, 0.8 + 3.6 * lines * len(regimes))
    panels = figure.subplots(
        lines * len(regimes), columns, squeeze=False, sharey=True, gridspec_kw={"hspace": 0.06}
    )
    for block, regime in enumerate(regimes):
        for number in range(lines * columns):
            panel = panels[block * lines + number % lines][number // lines]
            if number >= len(kinds):
                panel.set_visible(False)
                continue
            kind, members = list(kinds.items())[number]
            _draw_lines(panel, members, names, regime)
            panel.set_title(f"{kind}, {regime}", fontsize="medium")
    for line in panels:
        line[0].set_ylabel(AXES["TFLOP/s"])
    panels[0][0].set_ylim(bottom=0)  # shared, so after all panels have their lines


def _draw_lines(panel: Any, members: Cases, names: Sequence[str], regime: str) -> None:
    for number, name in enumerate(names):
        ran = [case for case in members if regime in case["results"].get(name, {})]
        speeds = [case["results"][name][regime]["tflops"] for case in ran]
        lengths = [case["kv_len"] for case in ran]
        panel.plot(lengths, speeds, **_style(number, name))
    lengths = sorted({case["kv_len"] for case in members})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [length_text(length) for length in lengths])
    panel.set_xlabel("length of queries and keys")
    panel.grid(alpha=0.3)


def _draw_cases(figure: Any, cases: Cases, names: Sequence[str], regimes: Sequence[str]) -> None:
    """A panel for each unit and regime, with a row for each case."""
    by_unit = {
        unit: [case for case in cases if case["unit"] == unit]
        for unit in dict.fromkeys(case["unit"] for case in cases)
    }
    heights = [0.8 + _rows_height(unit, len(by_unit[unit]), len(names)) for unit in by_unit]
    figure.set_size_inches(3.0 + 4.8 * len(regimes), 1.0 + sum(heights))
    panels = figure.subplots(
        len(by_unit),
        len(regimes),
        squeeze=False,
        sharex="row",
        sharey="row",
        gridspec_kw={"height_ratios": heights},
    )
    for line, (unit, members) in zip(panels, by_unit.items(), strict=True):
        for panel, regime in zip(line, regimes, strict=True):
            (_draw_times if unit == "us" else _draw_bars)(panel, members, names, regime)
            panel.set_title(regime, fontsize="medium")
            panel.set_xlabel(AXES[unit])
        line[0].set_yticks(range(len(members)), [case["name"] for case in members])
        line[0].set_ylim(len(members) - 0.4, -0.6)


def _rows_height(unit: str, rows: int, names: int) -> float:
    """Inches: points lie in one line, bars one below the other, closer where there are many."""
    return 0.3 * rows if unit == "us" else min(0.12 * (names + 1) * rows, 15.0)


def _draw_bars(panel: Any, members: Cases, names: Sequence[str], regime: str) -> None:
    height = 1.0 / (len(names) + 1)
    for number, name in enumerate(names):
        ran = [i for i, case in enumerate(members) if regime in case["results"].get(name, {})]
        speeds = [members[i]["results"][name][regime]["tflops"] for i in ran]
        offset = (number - (len(names) - 1) / 2) * height
        panel.barh([i + offset for i in ran], speeds, height, label=LABELS.get(name, name))
    panel.set_axisbelow(True)
    panel.grid(axis="x", alpha=0.3)


def _draw_times(panel: Any, members: Cases, names: Sequence[str], regime: str) -> None:
    from matplotlib.ticker import LogFormatter  # type: ignore[import-not-found,unused-ignore]

    for number, name in enumerate(names):
        ran = [i for i, case in enumerate(members) if regime in case["results"].get(name, {})]
        times = [members[i]["results"][name][regime]["median"] * 1e6 for i in ran]
        panel.plot(times, ran, linestyle="none", **_style(number, name))
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))  # where there is room
    panel.grid(alpha=0.3)


def _style(number: int, name: str) -> dict[str, Any]:
    return {"marker": MARKERS[number % len(MARKERS)], "label": LABELS.get(name, name)}


def _legend(figure: Any) -> tuple[list[Any], list[str]]:
    """Each contender once, in the first panel's order."""
    found: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
