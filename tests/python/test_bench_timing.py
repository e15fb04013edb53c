"""How `python -m prefill bench` times, on a device that is not there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench_cases import CORE, CPU, FEATURES, FakeRunner, small
from fake_peers import FakeCudnn
from fakes import pretend
from prefill import backends
from prefill.bench import contenders, host, report, timing
from prefill.bench.cases import GRIDS, Case, Length, expand, quantised_whole


def test_statistics() -> None:
    assert timing.statistics([4.0, 1.0, 3.0, 2.0]) == (1.75, 2.5, 3.25, 4)
    assert timing.statistics([7.0]) == (7.0, 7.0, 7.0, 1)
    with pytest.raises(ValueError, match="no values"):
        timing.statistics([])


def test_input_sets() -> None:
    l2 = 60 << 20
    for grid in GRIDS.values():
        for case in expand(grid):
            sets = timing.count_sets(case, l2)
            assert sets >= 3
            assert sets * case.input_bytes <= timing.MOST_INPUT_BYTES
            assert sets * case.input_bytes >= 2 * l2
            assert timing.calls_per_graph(case, sets) in (1, sets)
    short, long = expand(CORE)[0], expand(CORE)[6]
    assert timing.calls_per_graph(short, timing.count_sets(short, l2)) > 16
    assert timing.calls_per_graph(long, timing.count_sets(long, l2)) == 1
    tiny = small(length=Length(1, 64))
    assert timing.count_sets(tiny, l2) == timing.MOST_SETS


def test_rounds_keep_to_the_budget() -> None:
    assert timing.rounds(2.0, [0.05, 0.05], (5, 24)) == 20
    assert timing.rounds(2.0, [0.001], (5, 24)) == 24
    assert timing.rounds(2.0, [1.0, 1.0], (5, 24)) == 5


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    runners = [FakeRunner(name, 1e-4, 1e-3, turns) for name in "abc"]
    effort = timing.Effort(0.0, (2, 9), 0.0, (3, 9))
    samples = timing.measure(runners, ["burst", "sustained"], effort)
    orders = ["abc", "bca", "abc", "bca", "cab"]
    regimes = ["burst", "burst", "sustained", "sustained", "sustained"]
    assert turns == [
        f"{regime} {name}" for regime, order in zip(regimes, orders, strict=True) for name in order
    ]
    assert samples["a"]["burst"].seconds == [1e-4] * 2
    assert samples["b"]["sustained"].clocks == [1600] * 3
    assert len(samples["c"]["sustained"].seconds) == 3 * 80
    assert timing.measure([], ["burst"], effort) == {}


def test_the_core_grid_takes_minutes() -> None:
    """At speeds like an H200's; the graphs' warm-up is part of each sustained turn."""
    total = 0.0
    for case in expand(CORE):
        seconds = [case.flop / speed for speed in (650e12, 350e12, 600e12, 340e12)]
        calls = timing.calls_per_graph(case, timing.count_sets(case, 60 << 20))
        turns: list[str] = []
        runners = [FakeRunner(str(i), s, s * calls, turns) for i, s in enumerate(seconds)]
        timing.measure(runners, timing.REGIMES, timing.NORMAL)
        replays = {r.name: r.replay_seconds for r in runners}
        for turn in turns:
            regime, name = turn.split()
            timed = max(timing.TIMED, 3 * replays[name])
            cost = timing.GAP + replays[name] if regime == "burst" else timing.WARM + timed
            total += cost
    assert 90.0 < total < 140.0, total


class FakeDevice:
    """Graphs that make their calls again, and events 3 ms apart."""

    def __init__(self) -> None:
        self.captured: list[FakeDevice.Graph] = []
        self.calls: list[contenders.Call] = []

    class Graph:
        def __init__(self) -> None:
            self.replays = 0
            self.calls: list[contenders.Call] = []

        def replay(self) -> None:
            self.replays += 1
            for call in self.calls:
                call()

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return 3.0

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        before = len(self.calls)
        yield
        graph.calls = self.calls[before:]
        self.captured.append(graph)


class Noted:
    """A contender whose calls the fake device sees."""

    def __init__(
        self, of: str | contenders.Contender, device: FakeDevice, factor: float = 1.0
    ) -> None:
        self._of = contenders.Ours(of) if isinstance(of, str) else of
        self._device = device
        self._factor = factor
        self.name = self._of.name
        self.context = self._of.context
        self.as_nhd = self._of.as_nhd
        self.dtype = self._of.dtype

    def prepare(self, case: Case, inputs: Any) -> contenders.Call:
        call = self._of.prepare(case, inputs)

        def noted() -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                self._device.calls.append(noted)
            return call() if self._factor == 1.0 else call().mul_(self._factor)

        return noted


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    pretend(monkeypatch)
    device = FakeDevice()
    capturing = []

    @contextmanager
    def graph(graph: FakeDevice.Graph) -> Iterator[None]:
        capturing.append(True)
        with device.capture(graph):
            yield
        capturing.pop()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeDevice.Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeDevice.Event())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    monkeypatch.setattr(timing, "MOST_SETS", 4)
    return device


@pytest.mark.parametrize("per_graph", [1, 4])
def test_graphs(fake_device: FakeDevice, per_graph: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "calls_per_graph", lambda case, sets: per_graph)
    chosen = [Noted("fa3", fake_device), Noted("fa2", fake_device, 1.05), Noted("fa9", fake_device)]
    prepared = timing.prepare(small(), chosen, CPU, lambda: 1500)
    assert prepared.sets == 4
    assert [runner.name for runner in prepared.runners] == ["fa3"]
    assert prepared.dtypes == {"fa3": "bfloat16"}
    assert "times the tolerance" in prepared.wrong["fa2"]
    assert prepared.refused["fa9"].startswith("ValueError: backend")
    graphs = fake_device.captured[: 4 // per_graph]
    assert [len(graph.calls) for graph in graphs] == [per_graph] * len(graphs)
    (runner,) = prepared.runners
    assert runner.replay_seconds == pytest.approx(3e-3)
    assert runner.burst() == pytest.approx(3e-3 / per_graph)
    before = sum(graph.replays for graph in graphs)
    seconds, clock = runner.sustained(5)
    assert seconds == pytest.approx([3e-3 / per_graph] * 5)
    assert clock == 1500
    after = [graph.replays for graph in graphs]
    assert sum(after) - before == math.ceil(timing.WARM / 3e-3) + 5
    assert max(after) - min(after) <= 1  # the graphs take turns


def test_float8_outputs(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no arithmetic in it, and a contender that leaves NaN there is found."""
    FakeCudnn(monkeypatch, (9, 0))
    case = small(quantised_whole("causal", causal=True))
    cudnn8 = contenders.CudnnFloat8()
    prepared = timing.prepare(case, [Noted(cudnn8, fake_device)], CPU, lambda: None)
    assert prepared.dtypes == {"cudnn8": "float8_e4m3fn"}
    (runner,) = prepared.runners
    assert isinstance(runner, timing.GraphRunner)
    assert {out.dtype for out in runner.outputs} == {torch.float8_e4m3fn}
    idle = timing.prepare(case, [cudnn8], CPU, lambda: None)  # its graphs have no calls
    assert idle.wrong == {"cudnn8": "NaN or infinity in the output"}


def test_host_times() -> None:
    calls = []
    synchronized = []
    result = host.measure(
        lambda: calls.append(0), lambda: synchronized.append(0), calls=40, batch=10
    )
    assert len(calls) == 50
    assert len(synchronized) == 5
    assert result["samples"] == 40
    assert 0 < result["low"] <= result["median"] <= result["high"]


def test_a_case_that_nobody_can_run(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROPE_LLAMA with kernels that refuse it: no figure, and the reason."""
    rope = next(case.variant for case in FEATURES if case.name == "d128 4k RoPE")
    chosen = [
        Noted("fa3", fake_device),
        Noted("fa2", fake_device),
        contenders.Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    ]

    class Without(backends.NativeBackend):
        def unsupported_reasons(self, request: Any, device: Any) -> list[str]:
            assert request.pos_encoding_mode == "ROPE_LLAMA"
            return [f"{self.name} has no ROPE_LLAMA in this test"]

    for name in ("fa3", "fa2"):
        monkeypatch.setitem(backends.BY_NAME, name, Without(name))
    case = small(rope)
    prepared = timing.prepare(case, chosen, CPU, lambda: None)
    assert prepared.runners == []
    result = report.case_result(
        case, prepared.sets, timing.measure([], ["burst"], timing.QUICK), prepared.refused, {}, {}
    )
    told = report.remarks([result])
    assert len(told) == 3
    texts = ("fa3 has no ROPE_LLAMA", "fa2 has no ROPE_LLAMA", "SDPA has no ROPE_LLAMA")
    for line, text in zip(told, texts, strict=True):
        assert "refused" in line
        assert text in line
    assert report.markdown_table([result], ["fa3", "fa2", "cudnn"], "burst").endswith(
        "| - | - | - | - | - | - |"
    )
