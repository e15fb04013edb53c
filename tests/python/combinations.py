"""Sets of cases: one that covers every pair of values, and random ones.

What a backend takes is asked of it, for a full build on a Hopper GPU: a value that it refuses today
joins both sets on the day that it does not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, TypeVar

import pytest

from cases import PLAIN, VALUES, Case, make_call
from fakes import cuda, library
from prefill import support
from prefill.backends import PRIORITY
from prefill.request import make_request

FULL_BUILD = library()
HOPPER = cuda(9, 0)
LONGEST = 700
NUMBERS = ("head_dims", "group", "qo_len", "kv_len", "window_left", "soft_cap", "sm_scale")
"""What random cases draw from ranges; the rest are words, of `VALUES`."""

T = TypeVar("T")
Pair = frozenset[tuple[str, Any]]


@cache
def takers(case: Case) -> frozenset[str]:
    """The backends that take the case."""
    call = make_call(replace(case, qo_len=2, kv_len=3), "cpu")  # lengths have no say; these are few
    try:
        request = make_request(*call.tensors, **call.arguments)
    except ValueError:
        return frozenset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "_native", FULL_BUILD)
        patch.setattr(support, "driver_version", lambda: 0)
        return frozenset(b.name for b in PRIORITY if not b.unsupported_reasons(request, HOPPER))


def pairs(case: Case) -> list[Pair]:
    return [
        frozenset(pair)
        for pair in itertools.combinations([(name, getattr(case, name)) for name in VALUES], 2)
    ]


def taken_pairs(backend: str) -> list[Pair]:
    """Each two values that `backend` takes together, all else being plain."""
    return [
        frozenset(((one, x), (other, y)))
        for one, other in itertools.combinations(VALUES, 2)
        for x, y in itertools.product(VALUES[one], VALUES[other])
        if backend in takers(replace(PLAIN, **{one: x, other: y}))
    ]


@cache
def covering_set(backend: str) -> tuple[Case, ...]:
    """Cases of `backend` that hold each of its `taken_pairs`; greedy, the same each time."""
    shuffle = random.Random(0)
    left = dict.fromkeys(taken_pairs(backend))
    cases = []
    while left:
        chosen = dict(next(iter(left)))
        for name in shuffle.sample(list(VALUES), len(VALUES)):
            if name in chosen:
                continue
            options = shuffle.sample(VALUES[name], len(VALUES[name]))
            options.sort(key=new_pairs(left, chosen, name), reverse=True)
            chosen[name] = next(
                value
                for value in options
                if backend in takers(replace(PLAIN, **chosen, **{name: value}))
            )
        cases.append(replace(PLAIN, **chosen))
        for pair in pairs(cases[-1]):
            left.pop(pair, None)
    return tuple(cases)


def new_pairs(left: dict[Pair, None], chosen: dict[str, Any], name: str) -> Callable[[Any], int]:
    """How many pairs of `left` a value of `name` makes with those chosen."""
    return lambda value: sum(frozenset((each, (name, value))) in left for each in chosen.items())


class Draw(Protocol):
    """Where random cases come from."""

    def integer(self, low: int, high: int) -> int: ...
    def number(self, low: float, high: float) -> float: ...
    def choice(self, options: Sequence[T]) -> T: ...


class Seeded:
    """From a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def number(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return self.random.choice(options)


def random_case(draw: Draw, backend: str) -> Case:
    """A case that `backend` takes; what it refuses beside the choices so far is drawn again."""
    case = replace(
        PLAIN,
        head_dims=(8 * draw.integer(1, 32), 8 * draw.integer(1, 32)),
        group=draw.integer(1, 9),
        kv_heads=draw.integer(1, 3),
        qo_len=draw.integer(1, LONGEST),
        kv_len=draw.integer(1, LONGEST),
        window_left=draw.choice((-1, draw.integer(0, LONGEST))),
        soft_cap=draw.choice((None, draw.number(0.01, 100.0))),
        sm_scale=draw.choice((None, 0.0, draw.number(-0.5, 0.5), draw.number(-3.0, 3.0))),
        mask_share=draw.number(0.0, 1.0),
    )
    for name in VALUES:
        options = [] if name in NUMBERS else list(VALUES[name])
        while options:
            value = draw.choice(options)
            options.remove(value)
            if backend in takers(replace(case, **{name: value})):
                case = replace(case, **{name: value})
                break
    return case
