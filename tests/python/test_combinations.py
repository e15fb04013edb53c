"""The sets of cases and the check of a case, without a GPU: what the GPU tier relies on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import E4M3, FLOAT16, PLAIN, VALUES, Case, check, make_call
from combinations import (
    NUMBERS,
    Seeded,
    covering_set,
    pairs,
    random_case,
    taken_pairs,
    takers,
)
from drawn import Drawn
from exactness import LOG2_E, Ledger, expect, normal
from naive import naive_attention
from prefill import ops
from prefill.reference import reference_attention
from prefill.request import PrefillRequest

BACKENDS = ("fa2", "fa3", "reference")
MIXED = (FLOAT16, E4M3, E4M3)
# What the function itself has no meaning for: the reduction is of float16 q and k.
MEANINGLESS = {
    frozenset((("dtypes", dtypes), ("fp16_reduction", True)))
    for dtypes in VALUES["dtypes"]
    if dtypes != (FLOAT16, FLOAT16, FLOAT16)
}


def small(case: Case) -> Case:
    return replace(case, qo_len=min(case.qo_len, 37), kv_len=min(case.kv_len, 29))


def with_all(cases: tuple[Case, ...]) -> set[Any]:
    return {pair for case in cases for pair in pairs(case)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_is_covered(backend: str) -> None:
    """Of values that are taken alone each two are taken together, but for `MEANINGLESS`."""
    alone = {
        name: [v for v in values if backend in takers(replace(PLAIN, **{name: v}))]
        for name, values in VALUES.items()
    }
    names = list(VALUES)
    wanted = {
        frozenset(((one, x), (other, y)))
        for i, one in enumerate(names)
        for other in names[i + 1 :]
        for x, y in product(alone[one], alone[other])
    } - MEANINGLESS
    assert set(taken_pairs(backend)) == wanted
    cases = covering_set(backend)
    assert with_all(cases) >= wanted
    assert all(backend in takers(case) for case in cases)
    assert len(cases) < 120


def test_a_set_with_a_case_less_does_not_cover() -> None:
    """The assertion above can fail: each of the last cases has pairs that no other has."""
    cases, wanted = covering_set("fa3"), set(taken_pairs("fa3"))
    assert not with_all(cases[:-1]) >= wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_asked_for_everything(backend: str) -> None:
    held = {(name, getattr(case, name)) for case in covering_set(backend) for name in VALUES}
    assert held == {(name, value) for name, values in VALUES.items() for value in values}


def test_a_backend_that_refuses_more_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefill.backends import NativeBackend

    def no_rope(_: NativeBackend, request: PrefillRequest, __: object) -> list[str]:
        return ["no RoPE"] if request.pos_encoding_mode == "ROPE_LLAMA" else []

    rope, mixed = replace(PLAIN, position="RoPE"), replace(PLAIN, dtypes=MIXED)
    monkeypatch.setattr(NativeBackend, "unsupported_reasons", no_rope)
    takers.cache_clear()
    try:
        assert takers(rope) == {"reference"}
        assert takers(mixed) == set(BACKENDS)
        cases = covering_set.__wrapped__("fa3")
        assert not any(case.position.startswith("RoPE") for case in cases)
        assert any(case.dtypes == MIXED for case in cases)
    finally:
        takers.cache_clear()


def test_sets_are_the_same_in_every_process() -> None:
    """pytest-xdist needs that, and a seed that is to be run again."""
    made = "[covering_set('fa2'), [random_case(Seeded(seed), 'fa2') for seed in range(3)]]"
    paths = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}; from combinations import *; print({made})"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [covering_set("fa2"), [random_case(Seeded(seed), "fa2") for seed in range(3)]]
    assert elsewhere.stdout.strip() == str(here)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_cases(backend: str) -> None:
    cases = [random_case(Seeded(seed), backend) for seed in range(60)]
    assert len(set(cases)) == 60
    assert all(backend in takers(case) for case in cases)
    assert max(case.kv_len for case in cases) > 600
    for name in set(VALUES) - set(NUMBERS):
        taken = {v for v in VALUES[name] if backend in takers(replace(PLAIN, **{name: v}))}
        assert {getattr(case, name) for case in cases} == taken, name


REFERENCE_CASES = covering_set("reference")


@pytest.mark.parametrize("number", range(len(REFERENCE_CASES)))
def test_reference_passes_the_check(number: int) -> None:
    check(small(REFERENCE_CASES[number]), "reference", "cpu")


@pytest.mark.parametrize("seed", range(40))
def test_reference_passes_the_check_of_random_cases(seed: int) -> None:
    check(small(random_case(Seeded(seed), "reference")), "reference", "cpu")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_reference_passes_the_check_of_drawn_cases(data: Any) -> None:
    check(small(random_case(Drawn(data.draw), "reference")), "reference", "cpu")


@pytest.mark.parametrize("seed", range(12))
def test_expected_is_what_the_naive_code_computes(seed: int) -> None:
    """Two writings of the contract that share no line."""
    case = replace(random_case(Seeded(seed), "reference"), qo_len=7, kv_len=11, nan_key=False)
    call = make_call(case, "cpu")
    expected = expect(*call.plain_tensors, **call.plain_arguments)
    given = {n: x for n, x in call.plain_arguments.items() if x is not None}
    given |= {n: float(given[n]) for n in ("k_scale", "v_scale") if n in given}
    out, lse = naive_attention(*call.plain_tensors, **given)
    torch.testing.assert_close(expected.out, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(expected.lse, lse, rtol=1e-6, atol=1e-6)


ERRORS: dict[str, dict[str, Any]] = {
    "a key too many": {"mask": "causal"},
    "one element": {},
    "LSE": {"lse": "new"},
    "NaN": {},
    "no NaN": {"nan_key": True},
    "no infinity": {"mask": "causal", "qo_len": 70, "lse": "new"},
    "past the end": {"out": "rows"},
    "beside a head": {"out": "wide"},
    "beside the LSE": {"lse": "transposed"},
    "not the same twice": {},
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_check_sees_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(PLAIN, qo_len=40, lse="new")
    case = replace(case, **ERRORS[name])
    check(case, "reference", "cpu")
    calls = []

    def faulty(request: PrefillRequest) -> tuple[Tensor, Tensor | None]:
        calls.append(request)
        if name == "a key too many":
            request = request._replace(causal=False)
        out, lse = reference_attention(request)
        assert lse is not None
        if name == "one element":
            out[20, 1, 5] += 0.01
        elif name == "LSE":
            lse[20, 1] += 0.01
        elif name == "NaN":
            out[20, 1, 5] = torch.nan
        elif name == "no NaN":
            out.nan_to_num_()
        elif name == "no infinity":
            lse.clamp_(min=-1e30)
        elif name in ("past the end", "beside a head") and request.out is not None:
            step = out.shape[0] * out.stride(0) if name == "past the end" else out.shape[2]
            torch.as_strided(out, (1,), (1,), out.storage_offset() + step).fill_(1.0)
        elif name == "beside the LSE" and request.lse is not None:
            torch.as_strided(lse, (1,), (1,), lse.storage_offset() - 1).fill_(1.0)
        elif name == "not the same twice" and len(calls) == 2:
            out[20, 1, 5] += 1e-3
        return out, lse

    monkeypatch.setattr(ops, "reference_attention", faulty)
    with pytest.raises(AssertionError):
        check(case, "reference", "cpu")


def test_what_rotation_may_move_is_small() -> None:
    """It makes room for roundings that are open, not for a wrong angle."""
    case = replace(PLAIN, position="RoPE", qo_len=60, kv_len=200, mask="causal")
    call = make_call(case, "cpu")
    expected = expect(*call.plain_tensors, **call.plain_arguments)
    assert 0.0 < expected.lse_moved.max() < 1e-2
    ledger = Ledger()
    wrong = expect(*call.plain_tensors, **call.plain_arguments | {"rope_theta": 1.001e4})
    ledger.result("theta", wrong.out.half(), wrong.lse.float(), expected)
    with pytest.raises(AssertionError):
        ledger.finish()


def test_what_soft_caps_may_move_is_small() -> None:
    """There is room for the kernels' fitted tanh, not for the 2^-11 of `tanh.approx`."""
    case = replace(PLAIN, soft_cap=30.0, sm_scale=1.0, qo_len=60, kv_len=200)
    call = make_call(case, "cpu")
    plain = expect(*call.plain_tensors, **call.plain_arguments, of_kernel=False)
    expected = expect(*call.plain_tensors, **call.plain_arguments)
    assert plain.lse_moved.max() == 0.0
    assert 0.0 < expected.lse_moved.max() < 1e-3
    assert (expected.worst > plain.worst).all()
    wrong_cap = call.plain_arguments | {"logits_soft_cap": 30.0 * (1 + 2.0**-11)}
    wrong = expect(*call.plain_tensors, **wrong_cap)
    ledger = Ledger()
    ledger.result("cap", wrong.out.half(), wrong.lse.float(), expected)
    with pytest.raises(AssertionError, match="beyond its arithmetic"):
        ledger.finish()


@pytest.mark.parametrize("ulps", [0, 16])
def test_biases_round_beside_steep_logits(ulps: int) -> None:
    """Kernels round a bias with its logit in base 2; a logit that is off by more shows.

    Of these keys of equal score the plain computation happens to lose less than a quarter of it.
    """
    q = normal(8, 1, 64, dtype=torch.float16, seed=50, device="cpu")
    k = normal(1, 1, 64, dtype=torch.float16, seed=1, device="cpu").expand(2, 1, 64)
    q, k = ((4 * x).round() / 4 for x in (q, k))
    v = normal(2, 1, 256, dtype=torch.float16, seed=2, device="cpu")
    sm_scale, slope = 2e4, 2.0**-8
    expected = expect(q, k, v, sm_scale=sm_scale, pos_encoding_mode="ALIBI", o_dtype=torch.float32)
    distance = torch.arange(2) - (torch.arange(8)[:, None] - 6)
    scores = q[:, 0].double() @ k[:, 0].double().T
    gain = torch.tensor(sm_scale * LOG2_E).double()
    logits = (scores * gain + LOG2_E * slope * distance).float()
    logits[:, 0] *= 1 + ulps * 2.0**-23
    weights = torch.exp2(logits - logits.amax(-1, keepdim=True))
    weights /= weights.sum(-1, keepdim=True)
    ledger = Ledger()
    ledger.result("biased", (weights @ v[:, 0].float())[:, None], None, expected)
    if ulps:
        with pytest.raises(AssertionError, match="twice the plain error"):
            ledger.finish()
    else:
        ledger.finish()
