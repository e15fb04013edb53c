"""The cases of `gpu/test_splits.py`: what they cover, and that the reference passes them."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from cases import Case, check
from combinations import takers
from fakes import pretend
from split_cases import AXES, PACKING, Axes, covering, split_attention, split_cases

CASES = split_cases()
SMALL = [
    each
    for each in CASES
    if each.case.qo_len * each.case.kv_len * each.case.group < 20_000 and each.case.group <= 16
]


@pytest.mark.parametrize("axes", [AXES, PACKING])
def test_every_two_values_meet(axes: Axes) -> None:
    cover = covering(axes, 0)
    assert all(chosen.keys() == axes.keys() for chosen in cover)
    for one, other in itertools.combinations(axes, 2):
        met = {(chosen[one], chosen[other]) for chosen in cover}
        assert met == set(itertools.product(axes[one], axes[other]))
    # No set could be smaller than the pairs of the two longest axes.
    assert 80 <= len(cover) <= 130


def test_the_cases_are_few_and_taken_by_both_backends() -> None:
    assert len(CASES) <= 400
    assert len(set(CASES)) == len(CASES)
    for case, _ in CASES:
        assert {"fa2", "fa3"} <= takers(case), case


def test_most_cases_may_pack_heads() -> None:
    def packs(case: Case) -> bool:
        alibi = case.position.startswith("ALiBi")
        return case.group > 1 and not alibi and case.scale_q != "per head"

    assert sum(packs(case) for case, _ in CASES) > len(CASES) // 2


@pytest.mark.parametrize("number", range(0, len(SMALL), 4))
def test_the_reference_passes(number: int) -> None:
    case, num_splits = SMALL[number]
    check(case, "reference", "cpu", partial(split_attention, num_splits=num_splits))


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_number_of_splits_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, return_lse: bool
) -> None:
    stub = pretend(monkeypatch)
    q, k = torch.randn(3, 4, 64).half(), torch.randn(9, 2, 64).half()
    arguments: dict[str, Any] = {"causal": True, "return_lse": return_lse}
    result = split_attention(q, k, k, backend="fa2", num_splits=5, **arguments)
    [call] = stub.calls
    assert (call["backend"], call["num_splits"]) == ("fa2", 5)
    assert isinstance(result, tuple) == return_lse
