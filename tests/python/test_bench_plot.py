"""The pictures of `python -m prefill bench --plot`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench_cases import feature_cases, measured
from prefill.__main__ import main
from prefill.bench import contenders, plot

RESULTS = sorted((Path(__file__).parents[2] / "docs/results").glob("*.json"))


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


def drawn(cases: list[dict[str, Any]], names: list[str], title: str = "title") -> Any:
    figure = plot.draw(cases, names, title)
    figure.draw_without_rendering()  # lays it out
    return figure


def points(panel: Any) -> int:
    """How many points and bars a panel has; each lies inside it."""
    (left, right), (bottom, top) = (sorted(get()) for get in (panel.get_xlim, panel.get_ylim))
    found = [point for line in panel.lines for point in line.get_xydata()]
    found += [(bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in panel.patches]
    assert all(left <= x <= right and bottom <= y <= top for x, y in found)
    return len(found)


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_recorded_runs_are_drawn_whole(path: Path) -> None:
    """Every figure once, inside its panel; title, axes and legend inside the picture."""
    run = json.loads(path.read_text())
    figure = drawn(run["cases"], run["contenders"], "a long title, " * 12)
    panels = [panel for panel in figure.axes if panel.get_visible()]
    figures = sum(
        regime in result
        for case in run["cases"]
        for result in case["results"].values()
        for regime in run["regimes"]
    )
    assert sum(map(points, panels)) == figures
    width, height = figure.bbox.size
    assert width <= 1400
    assert height <= 1700
    for artist in (*panels, figure._suptitle, *figure.legends):
        box = artist.get_tightbbox()
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= width + 1
        assert box.y1 <= height + 1


@pytest.mark.usefixtures("_matplotlib")
def test_lengths_are_lines() -> None:
    names = ["d128 512 full", "d128 1k full", "d128 512 causal", "d128 1k causal"]
    figure = drawn([measured(name) for name in names], ["fa3", "cudnn"])
    titles = [panel.get_title() for panel in figure.axes]
    heads = "head dim 128, 32 query and 8 key heads\nbfloat16"
    kinds = [f"{heads}, {kind}" for kind in ("full", "causal")]
    assert titles == [f"{kind}, {regime}" for regime in ("burst", "sustained") for kind in kinds]
    assert all(len(panel.lines) == 2 for panel in figure.axes)
    assert all(panel.get_ylim()[0] == 0 for panel in figure.axes)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["prefill, fa3", "torch SDPA, cuDNN"]


@pytest.mark.usefixtures("_matplotlib")
def test_cases_of_one_length_are_bars() -> None:
    (burst, _) = drawn([measured(), measured("d128 1k causal")], ["fa3", "fa2"]).axes
    assert len(burst.patches) == 4
    labels = [label.get_text() for label in burst.get_yticklabels()]
    assert labels == ["d128 512 full", "d128 1k causal"]
    first, second = burst.patches[:2]
    assert first.get_width() == pytest.approx(measured()["flop"] / 1e-5 / 1e12)
    assert first.get_y() < second.get_y()
    assert burst.yaxis_inverted()


@pytest.mark.usefixtures("_matplotlib")
def test_times_have_a_panel_of_their_own() -> None:
    cases = [*feature_cases(), measured() | {"unit": "us"}]
    rates, times, *_ = figures = [
        panel for panel in drawn(cases, ["fa3", "fa2"]).axes if panel.get_title() == "burst"
    ]
    assert len(figures) == 2
    assert rates.get_xlabel().startswith("TFLOP/s")
    assert times.get_xlabel().startswith("microseconds")
    assert [line.get_xdata()[0] for line in times.lines] == pytest.approx([10.0, 20.0])


def test_every_contender_has_a_label() -> None:
    optional = {make().name for make in contenders.OPTIONAL.values()}
    assert {*contenders.available(), *optional} == set(plot.LABELS)
    assert len(plot.MARKERS) >= len(plot.LABELS)


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot{suffix}"
    assert plot.problem(path) == ""
    assert plot.plot(feature_cases(), ["fa3", "fa2", "cudnn"], path, "title")
    kinds = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(kinds[suffix])
    if suffix == ".svg":
        assert "d128 4k RoPE" in path.read_text()  # has no figure, and a row


@pytest.mark.usefixtures("_matplotlib")
def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = json.loads(RESULTS[0].read_text())
    for case in run["cases"]:
        case |= {"results": {"fa3": {"refused": "no"}}, "ratios": {}}
    written, path = tmp_path / "run.json", tmp_path / "plot.png"
    written.write_text(json.dumps(run))
    assert main(["bench", "--from-json", str(written), "--plot", str(path)]) == 0
    assert f"--plot {path}: not written" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.usefixtures("_matplotlib")
def test_a_name_of_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("plot.json", "plot"):
        assert main(["bench", "--plot", name]) == 2
        assert f"--plot {name}: expected a name that ends in .png" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--plot", "--json"])
def test_a_folder_that_is_not_there(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is measured."""
    path = tmp_path / "none" / "run.svg"
    assert main(["bench", option, str(path)]) == 2
    assert f"{option} {path}: there is no folder {path.parent}" in capsys.readouterr().err


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
