"""The set of calls for compute-sanitizer, without a GPU: it touches what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import prefill
import sanitizer_set
from cases import make_call
from fakes import CLASSES, DTYPES, FLOAT8, StubKernel, library, pretend
from fuzz_check import outcome
from garbage import WORDS
from prefill import kernel_dtype, support
from sanitizer_set import VARIANTS, cases_of, launch

BUILD = library().build
assert BUILD is not None
ROWS = {kernel.name: kernel for kernel in BUILD.kernels}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubKernel:
    return pretend(monkeypatch)


def test_every_row_is_touched(
    stub: StubKernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(sanitizer_set, "launch", lambda case, device: launched.append(case))
    assert sanitizer_set.main(["--device=cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kernels"] == list(ROWS)
    assert told["calls"] == len(launched) >= len(ROWS) * len(VARIANTS)
    found = set()
    for case in launched:
        call = make_call(case, "cpu")
        found.add(prefill.explain(*call.tensors, backend=case.backend, **call.arguments).kernel)
    assert found == set(ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_every_pass_is_touched(stub: StubKernel, backend: str, dtype: str) -> None:
    for _, case in cases_of(ROWS[f"{backend}_{dtype}_64x64"]):
        launch(case, "cpu")
    own = getattr(torch, dtype)
    calls = stub.calls
    assert {call["backend"] for call in calls} == {backend}
    masks = [call["mask"] for call in calls if call["mask"] is not None]
    assert {mask.dtype for mask in masks} == {torch.bool, torch.uint8}
    assert any(mask.dtype == torch.bool and not mask.is_contiguous() for mask in masks)
    assert any(mask.data_ptr() % 4 for mask in masks if mask.dtype == torch.uint8)
    float8 = {torch.float8_e4m3fn, torch.float8_e5m2}
    for name in ("q", "k", "v"):
        assert {call[name].dtype for call in calls} == {own} | float8
    outputs = {torch.float16, torch.bfloat16, torch.float32}
    assert {call["out"].dtype for call in calls} == outputs
    only_parts = [call for call in calls if call["out"].dtype != own]
    assert {call["num_splits"] > 1 for call in only_parts} == {False, True}
    assert any(call["q"].shape[1] > call["k"].shape[1] for call in only_parts)
    of_float8 = [call for call in calls if call["q"].dtype in float8]
    assert all(kernel_dtype.widened(x["q"].dtype, x["out"].dtype) == own for x in of_float8)
    assert {call["q"].dtype for call in of_float8 if call["rope"]} == float8
    assert {call["q"].shape[2] for call in of_float8 if call["rope"]} == {56, 64}
    for name in ("rope", "alibi", "soft_cap", "sinks", "lse", "scale_q", "scale_k", "scale_v"):
        given = [call[name] is not None and call[name] is not False for call in calls]
        assert any(given), name
        if name != "soft_cap":
            assert not all(given), name
    assert {0.0, 30.0} <= {call["soft_cap"] for call in calls}
    mixed = [call for call in calls if call["q"].dtype == own and call["k"].dtype in float8]
    assert any(call["rope"] for call in mixed)
    assert any(call["num_splits"] > 1 and call["sinks"] is not None for call in calls)
    packed = [call for call in calls if call["num_splits"] > 1 and call["scale_q"] is None]
    assert any(call["q"].shape[1] > call["k"].shape[1] for call in packed)
    assert {(call["window_left"] >= 0, call["window_right"]) for call in calls} >= {
        (False, -1),
        (False, 0),
        (True, 0),
        (True, -1),
    }


@pytest.mark.parametrize("dtype", FLOAT8)
def test_calls_of_a_float8_row_are_its_own(stub: StubKernel, dtype: str) -> None:
    for dims in CLASSES[1:]:
        row = f"fa3_{dtype}_{dims[0]}x{dims[1]}"
        for name, case in cases_of(ROWS[row]):
            call = make_call(replace(case, view=case.layouts[2]), "cpu")
            told = prefill.explain(*call.tensors, backend="fa3", **call.arguments)
            assert told.kernel == row, name
            launch(case, "cpu")
    outputs = {call["out"].dtype for call in stub.calls}
    assert outputs == {torch.float16, torch.bfloat16, torch.float32}
    assert {call["num_splits"] for call in stub.calls} >= {0, 3, 5}


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8])
def test_results_are_right(stub: StubKernel, dtype: str) -> None:
    dims = "64x64" if dtype in DTYPES else "128x128"
    for name, case in cases_of(ROWS[f"fa3_{dtype}_{dims}"]):
        assert outcome(case, "cpu").kind == "passed", name


def test_a_wrong_result_is_told(
    stub: StubKernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = library(classes=((64, 64),), dtypes=("float16",), archs={"fa3": ["90a-real"]})
    monkeypatch.setattr(support, "_native", one)
    original = StubKernel.__call__

    def faulty(self: StubKernel, *arguments: Any) -> None:
        original(self, *arguments)
        if arguments[14]:  # alibi
            arguments[4][:] += 1.0

    monkeypatch.setattr(StubKernel, "__call__", faulty)
    assert sanitizer_set.main(["--device=cpu", "--check"]) == 1
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert [text.partition(": ")[0] for text in wrong] == [
        "fa3_float16_64x64, everything",
        "fa3_float16_64x64, split, everything",
    ]


def test_random_calls(
    stub: StubKernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every backend; malformed ones end before a kernel, or are legal; the same ones again."""
    launched: list[Any] = []

    def keep(case: Any, device: str) -> None:
        launched.append(case)
        launch(case, device)

    monkeypatch.setattr(sanitizer_set, "launch", keep)
    assert sanitizer_set.main(["--device=cpu", "--fuzz=60", "--seed=3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["calls"], told["wrong"], told["device"]) == (60, [], "cpu")
    assert told["kernels"] == list(ROWS)
    assert {case.backend for case in launched} == {"fa2", "fa3"}
    broken = [case for case in launched if case.broken is not None]
    assert broken
    assert len(stub.calls) >= 0.8 * (len(launched) - len(broken))  # others have no rows
    first = [repr(case) for case in launched]
    launched.clear()
    assert sanitizer_set.main(["--device=cpu", "--fuzz=60", "--seed=3", "--backend=fa3"]) == 0
    assert {case.backend for case in launched} == {"fa3"}
    assert sanitizer_set.main(["--device=cpu", "--fuzz=60", "--seed=3"]) == 0
    assert [repr(case) for case in launched[60:]] == first


def test_another_error_of_a_malformed_call_is_not_caught(
    stub: StubKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: StubKernel, *_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(StubKernel, "__call__", crash)
    # Legal, and so it reaches the kernel.
    case = replace(next(iter(cases_of(ROWS["fa3_float16_64x64"])))[1], broken=("causal", "True"))
    assert "True" in WORDS
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch(case, "cpu")
