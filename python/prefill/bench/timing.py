"""How GPU time is taken.

A CUDA graph holds one call on each of several independent input sets, which together exceed the L2
cache; calls so long that a graph of them would outlast a burst have a graph each. Contenders take
turns in rounds, in an order that rotates, under one of two regimes, because the card's clock falls
under load:

- burst: the GPU rests `GAP` seconds before each timed replay.
- sustained: at least `WARM` seconds of the contender's own replays run right before the timed ones,
  without a pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prefill.bench.cases import Case, Inputs
from prefill.bench.check import Checker, computable
from prefill.bench.contenders import Contender, attempt
from prefill.support import dtype_name

REGIMES = ("burst", "sustained")
GAP = 0.03
WARM = 0.5
TIMED = 0.08  # of sustained replays that count, per turn
MOST_INPUT_BYTES = 2_000_000_000
MOST_SETS = 64
LEAST_GRAPH = 250e-6  # shorter graphs would be timed along with their launch
LONGEST_GRAPH = 2e-3
SPIN_CYCLES = 400_000  # 0.2 ms, in which a whole timed replay is queued


class Effort(NamedTuple):
    """Wall time to spend per case and regime, and the bounds of the rounds it gives."""

    burst_seconds: float
    burst_rounds: tuple[int, int]
    sustained_seconds: float
    sustained_rounds: tuple[int, int]


NORMAL = Effort(2.0, (5, 24), 6.5, (2, 5))
QUICK = Effort(0.6, (3, 8), 2.4, (1, 1))


class Runner(Protocol):
    """A contender ready to be timed on a case."""

    @property
    def name(self) -> str: ...

    @property
    def replay_seconds(self) -> float:
        """About how long a replay takes."""
        ...

    def burst(self) -> float:
        """Seconds per call of one replay after a rest."""
        ...

    def sustained(self, replays: int) -> tuple[list[float], int | None]:
        """Seconds per call of each of the replays under load, and the clock then in MHz."""
        ...


@dataclass
class Samples:
    """Seconds per call."""

    seconds: list[float] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)


class Statistics(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float
    samples: int


def statistics(values: Sequence[float]) -> Statistics:
    """Quantiles by linear interpolation; ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)

    def quantile(part: float) -> float:
        place = part * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return Statistics(quantile(0.25), quantile(0.5), quantile(0.75), len(ordered))


def count_sets(case: Case, l2_bytes: int) -> int:
    """How many input sets: twice the L2 together, a graph long enough to time, within memory."""
    needed = max(
        3,
        math.ceil(2 * l2_bytes / case.input_bytes),
        math.ceil(LEAST_GRAPH / estimate_seconds(case)),
    )
    return max(3, min(needed, MOST_SETS, MOST_INPUT_BYTES // case.input_bytes))


def estimate_seconds(case: Case) -> float:
    """What a call may take on a fast card."""
    return max(3e-6, case.flop / 600e12, case.input_bytes / 4e12)


def calls_per_graph(case: Case, sets: int) -> int:
    return sets if sets * estimate_seconds(case) <= LONGEST_GRAPH else 1


def rounds(budget: float, turn_seconds: Sequence[float], bounds: tuple[int, int]) -> int:
    least, most = bounds
    return max(least, min(most, round(budget / sum(turn_seconds))))


def measure(
    runners: Sequence[Runner], regimes: Sequence[str], effort: Effort
) -> dict[str, dict[str, Samples]]:
    """Samples by contender and regime."""
    samples = {runner.name: {regime: Samples() for regime in regimes} for runner in runners}
    if not runners:
        return samples
    if "burst" in regimes:
        turns = [GAP + runner.replay_seconds for runner in runners]
        for number in range(rounds(effort.burst_seconds, turns, effort.burst_rounds)):
            for runner in rotated(runners, number):
                samples[runner.name]["burst"].seconds.append(runner.burst())
    if "sustained" in regimes:
        replays = {r.name: max(3, min(400, round(TIMED / r.replay_seconds))) for r in runners}
        turns = [WARM + replays[runner.name] * runner.replay_seconds for runner in runners]
        for number in range(rounds(effort.sustained_seconds, turns, effort.sustained_rounds)):
            for runner in rotated(runners, number):
                seconds, clock = runner.sustained(replays[runner.name])
                kept = samples[runner.name]["sustained"]
                kept.seconds += seconds
                kept.clocks += [] if clock is None else [clock]
    return samples


def rotated(runners: Sequence[Runner], by: int) -> list[Runner]:
    start = by % len(runners)
    return [*runners[start:], *runners[:start]]


class GraphRunner:
    """A contender's calls as CUDA graphs."""

    def __init__(
        self,
        name: str,
        calls: Sequence[Callable[[], Tensor]],
        per_graph: int,
        clock: Callable[[], int | None],
    ) -> None:
        """Capture the calls, each of which has been made before; in the contender's context."""
        self.name = name
        self.outputs: list[Tensor] = []
        self._per_graph = per_graph
        self._clock = clock
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._turn = 0
        for first in range(0, len(calls), per_graph):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.outputs += [call() for call in calls[first : first + per_graph]]
            self._graphs.append(graph)
        self.replay_seconds = math.nan

    def fill_and_run(self) -> None:
        """Have the graphs write all outputs over NaN."""
        for out in self.outputs:
            out.fill_(math.nan)
        for graph in self._graphs:
            graph.replay()
        torch.cuda.synchronize()

    def estimate(self) -> None:
        """Measure `replay_seconds`, for the plan."""
        self._replay()
        self.replay_seconds = max(1e-6, min(self._timed_once() for _ in range(2)))

    def burst(self) -> float:
        torch.cuda.synchronize()
        time.sleep(GAP)
        return self._timed_once() / self._per_graph

    def sustained(self, replays: int) -> tuple[list[float], int | None]:
        for _ in range(math.ceil(WARM / self.replay_seconds)):
            self._replay()
        events = [_event() for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            self._replay()
            event.record()
        events[0].synchronize()
        clock = self._clock()
        events[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 / self._per_graph for a, b in pairwise(events)], clock

    def _replay(self) -> None:
        self._graphs[self._turn].replay()
        self._turn = (self._turn + 1) % len(self._graphs)

    def _timed_once(self) -> float:
        start, end = _event(), _event()
        spin: Any = torch.cuda._sleep
        spin(SPIN_CYCLES)  # the GPU is busy until all is queued, so no launch is timed
        start.record()
        self._replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)


@dataclass
class Prepared:
    """A case's runners, and why the others have none."""

    sets: int
    runners: list[Runner] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    """What each runner multiplies in."""


def prepare(
    case: Case,
    contenders: Sequence[Contender],
    device: torch.device,
    clock: Callable[[], int | None],
) -> Prepared:
    """Make the inputs, capture every contender's graphs and check what they compute."""
    l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    prepared = Prepared(count_sets(case, l2_bytes))
    per_graph = calls_per_graph(case, prepared.sets)
    arguments = case.arguments(device)
    sets = [case.inputs(device, arguments, seed) for seed in range(prepared.sets)]
    checker = Checker(case, sets[0])
    for contender in contenders:
        runner, reason = attempt(
            contender, partial(_capture, contender, case, sets, per_graph, clock)
        )
        if runner is None:
            prepared.refused[contender.name] = reason
            continue
        dtype = contender.dtype(case, sets[0])
        problem = checker.problem(contender.as_nhd(runner.outputs[0]), dtype)
        if not problem and not all(
            bool(computable(out).isfinite().all()) for out in runner.outputs
        ):
            problem = "NaN or infinity in the output for other inputs"
        if problem:
            prepared.wrong[contender.name] = problem
            continue
        runner.estimate()
        prepared.runners.append(runner)
        prepared.dtypes[runner.name] = dtype_name(dtype)
    return prepared


def _capture(
    contender: Contender,
    case: Case,
    sets: Sequence[Inputs],
    per_graph: int,
    clock: Callable[[], int | None],
) -> GraphRunner:
    calls = [contender.prepare(case, inputs) for inputs in sets]
    calls[0]()  # loads, compiles, plans
    torch.cuda.synchronize()
    runner = GraphRunner(contender.name, calls, per_graph, clock)
    runner.fill_and_run()
    return runner
