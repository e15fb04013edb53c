"""Random cases from hypothesis. Apart from `combinations`, which does without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Drawn:
    """What `random_case` draws from."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def number(self, low: float, high: float) -> float:
        return float(self.draw(st.floats(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]
