"""Runs a fuzzed case: whether its outcome is one that may be.

What must hold: a result that `exactness` allows; NaN and infinity where the reference has them;
nothing read from beside the tensors, where NaN lies, and nothing written but the results; the same
bits again. Or a refusal of a documented type.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cases import Call, make_call, make_tensors, placed
from exactness import LOG2_E, Expected, Ledger, expect
from fences import Fenced, fenced
from float8_scheme import is_native
from fuzz_cases import FuzzCase, fuzzed, simpler
from garbage import DOCUMENTED, garbage
from layouts import Guarded
from prefill import explain, single_prefill_with_kv_cache
from prefill.explain import Explanation
from prefill.reference import reference_attention
from prefill.request import make_request
from split_cases import split_attention

__all__ = ["Outcome", "fuzzed", "outcome", "reproducer", "run", "shrunk", "torch"]

ALLOWED = ("passed", "refused", "rejected")
SUBNORMAL = {
    torch.float16: 2.0**-20,
    torch.bfloat16: 2.0**-128,
    torch.float8_e4m3fn: 2.0**-8,
    torch.float8_e5m2: 2.0**-15,
}
"""What makes normal numbers subnormal."""


class Outcome(NamedTuple):
    """passed, refused (this backend lacks it), rejected (garbage), or what went wrong."""

    kind: str
    text: str = ""
    """Of a call that passed its backend, else what was said."""

    @property
    def is_failure(self) -> bool:
        return self.kind not in ALLOWED


def run(case: FuzzCase, device: str) -> None:
    """Raise where the outcome of the case is a failure, else say it."""
    found = outcome(case, device)
    assert not found.is_failure, f"{found.kind}: {found.text}"
    print(f"{found.kind}: {found.text}")


def reproducer(case: FuzzCase, device: str) -> str:
    """The case as one line for a shell at the root of the repository."""
    start = "from fuzz_check import fuzzed, run, torch"
    if device == "cpu":
        start = f"import fuzz; fuzz.pretend_gpu(); {start}"
    return f'PYTHONPATH=python:tests/python python -c "{start}; run({case!r}, {device!r})"'


def shrunk(case: FuzzCase, fails: Callable[[FuzzCase], bool], attempts: int = 200) -> FuzzCase:
    """The case made plainer and smaller, as far as it fails and so many attempts go."""
    while True:
        for candidate in simpler(case):
            if not attempts:
                return case
            attempts -= 1
            if fails(candidate):
                case = candidate
                break
        else:
            return case


@dataclass
class Inputs:
    """The tensors of a case, fenced."""

    call: Call
    fence: Fenced
    results: list[int]
    """Which tensors of the fence are results that were given."""


def outcome(case: FuzzCase, device: str) -> Outcome:
    """Run the case; errors of the library become an outcome, errors of these tests do not."""
    inputs = make_inputs(case, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # causal with a mask
        if case.broken is not None:
            return _outcome_of_garbage(case, inputs, device)
        return _outcome(case, inputs, device)


def _outcome(case: FuzzCase, inputs: Inputs, device: str) -> Outcome:
    call = inputs.call
    attention: Callable[..., Any] = single_prefill_with_kv_cache
    backend: str | None = case.backend
    try:
        told = explain(*call.tensors, backend=case.backend, **call.arguments)
        if told.backend is None:
            attention(*call.tensors, backend=case.backend, **call.arguments)
            return Outcome("not refused", f"explain says: {told.reason}")
        if case.num_splits and told.backend != "reference":
            attention = partial(split_attention, num_splits=case.num_splits)
            backend = told.backend
        leave_nan_behind(device)
        written = _results(attention(*call.tensors, backend=backend, **call.arguments))
        fresh = {n: x for n, x in call.arguments.items() if n not in call.results}
        again = _results(attention(*call.tensors, backend=backend, **fresh))
        synchronize(device)
    except NotImplementedError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # any other type is what this looks for
        return Outcome(type(error).__name__, str(error))
    try:
        _judge(case, inputs, told, written, again)
    except AssertionError as error:
        return Outcome("wrong", str(error))
    return Outcome("passed", told.backend)


def _outcome_of_garbage(case: FuzzCase, inputs: Inputs, device: str) -> Outcome:
    assert case.broken is not None
    name, word = case.broken
    call = inputs.call
    arguments = dict(zip("qkv", call.tensors, strict=True)) | call.arguments
    arguments |= {"backend": case.backend, name: garbage(word, call.tensors[0])}
    try:
        explain(**arguments)
        results = _results(single_prefill_with_kv_cache(**arguments))
        synchronize(device)
    except DOCUMENTED as error:
        return Outcome("rejected", f"{name} = {word}: {type(error).__name__}")
    except Exception as error:
        return Outcome(type(error).__name__, f"{name} = {word}: {error}")
    if name not in ("out", "lse") and inputs.fence.written(inputs.results).any():
        return Outcome("wrong", f"{name} = {word}: written beside the results")
    return Outcome("passed", f"{name} = {word}: {len(results)} results")


def leave_nan_behind(device: str) -> None:
    """In memory that torch gives away next: what is read before it is written then shows."""
    if device != "cpu":
        freed = [torch.full((1 << bits,), math.nan, device=device) for bits in range(7, 22)]
        del freed


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _results(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def make_inputs(case: FuzzCase, device: str) -> Inputs:
    q, k, v = tensors = make_tensors(case, device)
    _fill(case, q, k)
    if case.stray is not None:
        name, value, where = case.stray
        x = tensors["qkv".index(name)]
        x[_place(x, where)] = float(value)
    call = make_call(case, device, tensors)
    elsewhere = [
        placed(x, layout, "NHD" if x is q else case.kv_layout)
        for x, layout in zip(tensors, case.layouts, strict=True)
    ]
    names = [n for n, x in call.arguments.items() if isinstance(x, Tensor)]
    given = [call.results[n].buffer if n in call.results else call.arguments[n] for n in names]
    fence = fenced([*elsewhere, *given])
    q, k, v, *moved = fence.tensors
    call.tensors = (q, k, v)
    for name, x in zip(names, moved, strict=True):
        call.arguments[name] = x
        if name in call.results:
            call.results[name] = Guarded(x, call.results[name].index)
            call.arguments[name] = call.results[name].view
    return Inputs(call, fence, [3 + names.index(name) for name in call.results])


def _place(x: Tensor, where: float) -> tuple[int, ...]:
    """An element that far into the rows; head and channel follow from that."""
    return tuple(int(where * n * size) % size for n, size in zip((1, 7, 31), x.shape, strict=True))


def _fill(case: FuzzCase, q: Tensor, k: Tensor) -> None:
    """Put the case's numbers into q and k, which hold normal ones."""
    if case.numbers == "normal":
        return
    for x in (q, k):
        if case.numbers == "subnormal":
            x.copy_(x.double() * SUBNORMAL[x.dtype])
        elif case.numbers == "zero":
            x.zero_()
        else:  # of two fractional bits: every dtype has them
            factor = 16 if case.numbers == "large" else 1
            x.copy_((4 * x.float().nan_to_num()).round().clamp(-7, 7) / 4 * factor)
    if case.numbers == "far below":
        q[..., 0], k[..., 0] = 224.0, -224.0
    elif case.numbers == "equal" and case.kv_len:
        k.copy_(k[:1].clone().expand_as(k))
    if case.nan_key:
        k[case.kv_len // 2, 0] = math.nan


def _judge(
    case: FuzzCase,
    inputs: Inputs,
    told: Explanation,
    written: tuple[Tensor, ...],
    again: tuple[Tensor, ...],
) -> None:
    call, ledger = inputs.call, Ledger()
    out, lse = written[0], written[1] if len(written) == 2 else None
    assert out.dtype == case.result_dtype
    assert out.shape == (case.qo_len, case.group * case.kv_heads, case.head_dims[1])
    assert (lse is not None) == (case.lse != "none")
    ledger.none("bytes changed beside the results", inputs.fence.written(inputs.results))
    for name, guarded in call.results.items():
        ledger.none(f"written beside {name}", guarded.written_outside())
    if case.qo_len:
        expected = _expected(case, call, told)
        if case.stray is None:
            ledger.result("result", out, lse, expected)
        else:
            _judge_stray(ledger, case, call, out, lse, expected)
    for first, second in zip(written, again, strict=True):
        same = (first == second) | (first.isnan() & second.isnan())
        ledger.none("not the same twice", ~same)
    ledger.finish()


def _expected(case: FuzzCase, call: Call, told: Explanation) -> Expected:
    q, k, v = call.plain_tensors
    if case.kv_len:
        if case.stray is not None and case.stray[0] == "v":
            # Its products with weights of 0 would be NaN. (What e4m3 makes of infinity is finite.)
            v = v.double().nan_to_num(0.0, 0.0, 0.0).to(v.dtype)
        of_kernel, native = told.backend != "reference", is_native(told)
        return expect(q, k, v, **call.plain_arguments, of_kernel=of_kernel, native=native)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    lse, sinks = out[..., 0] - math.inf, call.plain_arguments["sinks"]
    if sinks is not None:
        lse = lse.copy_(sinks.double() * (LOG2_E if case.lse_base == "2" else 1.0))
    return Expected(out, lse, out, out, torch.zeros_like(lse), 0.0)


def _judge_stray(
    ledger: Ledger,
    case: FuzzCase,
    call: Call,
    out: Tensor,
    lse: Tensor | None,
    expected: Expected,
) -> None:
    """Not finite where the reference is not, and right elsewhere.

    NaN and infinity count as one: a weight that a kernel flushes to 0 makes NaN of an infinite
    value, and a logit of +inf makes NaN of the sum that it enters. A value that some row does not
    see may still make NaN of its channel.
    """
    assert case.stray is not None
    arguments = {n: x for n, x in call.arguments.items() if n not in ("out", "lse", "return_lse")}
    truth, truth_lse = reference_attention(
        make_request(*call.tensors, backend="reference", return_lse=True, **arguments)
    )
    assert truth_lse is not None
    may = torch.zeros_like(truth, dtype=torch.bool)
    name, _, where = case.stray
    if name == "v":
        _, head, channel = _place(call.plain_tensors[2], where)
        may[:, head * case.group : (head + 1) * case.group, channel] = True
        may &= (truth_lse != -math.inf)[..., None]  # a row that sees nothing is 0 whatever there is
    finite = truth.isfinite()
    ledger.none("finite, unlike the reference", out.isfinite() & ~finite)
    ledger.none("not finite, unlike the reference", ~out.isfinite() & finite & ~may)
    hidden = ~finite | (may & ~out.isfinite())
    shown, shown_lse = out.masked_fill(hidden, math.nan), None
    right = replace(
        expected,
        out=expected.out.masked_fill(hidden, math.nan),
        worst=expected.worst.nan_to_num(0.0, math.inf),
        plain_error=expected.plain_error.nan_to_num(0.0),
    )
    if lse is not None:
        unknown = truth_lse.isnan() | (truth_lse == math.inf)
        ledger.none("NaN or infinity in LSE", (lse.isnan() | (lse == math.inf)) != unknown)
        shown_lse = lse.masked_fill(unknown, math.nan)
        right = replace(right, lse=expected.lse.masked_fill(unknown, math.nan))
    # What e4m3 makes of infinity is its largest number, beside which others are small.
    ledger.result("result beside the stray", shown, shown_lse, right, few=may)
