"""What the tests of `python -m prefill bench` share: small cases, known times, made-up results."""

from __future__ import annotations

from typing import Any

import torch

from prefill.bench import masks, report
from prefill.bench.cases import FULL_AND_CAUSAL, GRIDS, Case, Heads, Length, Variant, expand
from prefill.bench.timing import Samples

CPU = torch.device("cpu")
CORE = GRIDS["core"]
CAUSAL = FULL_AND_CAUSAL["causal"]
SQUARE = Length(96, 96)
FEW_HEADS = Heads(4, 2, 64, 64)
APPEND = expand(GRIDS["append"])
FEATURES = expand(GRIDS["features"])
MASKS = {
    "tril": masks.TRIL,
    "padding": masks.PADDING,
    "blocks": masks.BLOCK_DIAGONAL,
    "random": masks.RANDOM,
    "tree": masks.TREE,
}


def small(
    variant: Variant = CAUSAL,
    length: Length = SQUARE,
    heads: Heads = FEW_HEADS,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    return Case(heads, length, "causal", variant, dtype)


class FakeRunner:
    """Takes a time that is known, and writes down its turns."""

    def __init__(self, name: str, seconds: float, replay_seconds: float, turns: list[str]) -> None:
        self.name = name
        self.replay_seconds = replay_seconds
        self._seconds = seconds
        self._turns = turns

    def burst(self) -> float:
        self._turns.append(f"burst {self.name}")
        return self._seconds

    def sustained(self, replays: int) -> tuple[list[float], int | None]:
        self._turns.append(f"sustained {self.name}")
        return [self._seconds * 1.25] * replays, 1600


def measured(
    name: str = "d128 512 full", slower: float = 1.0, **kwargs: dict[str, str]
) -> dict[str, Any]:
    case = next(case for case in expand(CORE) if case.name == name)
    times = {"fa3": 1e-5, "cudnn": 1.2e-5 * slower, "fa2": 2e-5, "flash": 2.2e-5}
    samples = {
        contender: {
            "burst": Samples([t, t * 1.1, t * 0.9]),
            "sustained": Samples([t * 1.2], [1600, 1500]),
        }
        for contender, t in times.items()
        if contender not in kwargs.get("refused", {}) and contender not in kwargs.get("wrong", {})
    }
    refused, wrong = kwargs.get("refused", {}), kwargs.get("wrong", {})
    return report.case_result(case, 3, samples, refused, wrong, dict.fromkeys(samples, "bfloat16"))


def feature_cases() -> list[dict[str, Any]]:
    """Plain causal, and a soft cap that takes fa3 twice as long and fa2 as long."""
    found = []
    for name, times in (
        ("d128 4k causal", {"fa3": 1e-3, "fa2": 2e-3, "cudnn": 1e-3}),
        ("d128 4k soft cap", {"fa3": 2e-3, "fa2": 2e-3}),
        ("d128 4k RoPE", {}),
    ):
        case = next(case for case in FEATURES if case.name == name)
        samples = {who: {"burst": Samples([seconds])} for who, seconds in times.items()}
        reasons = {who: f"{who} cannot" for who in ("fa3", "fa2", "cudnn") if who not in times}
        found.append(report.case_result(case, 3, samples, reasons, {}, {}))
    return found
