"""The fuzzer without a GPU: what it drives there, and that it would see what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fuzz
from cases import BFLOAT16, E4M3, E5M2, FLOAT16, VALUES
from combinations import Seeded
from drawn import Drawn
from fakes import StubKernel, pretend
from fences import FENCE_BYTES, fenced
from fuzz import SMALL, numbered
from fuzz_cases import (
    BACKENDS,
    LAYOUTS,
    NUMBERS,
    FuzzCase,
    can_be_judged,
    fuzz_case,
    fuzzed,
    simpler,
)
from fuzz_check import make_inputs, outcome, reproducer, run, shrunk
from garbage import ARGUMENTS, WORDS
from prefill import ops
from prefill.reference import reference_attention

CASES = 300


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


@pytest.fixture(scope="module")
def many() -> list[FuzzCase]:
    return [numbered(7, number, BACKENDS, "cuda") for number in range(3000)]


def test_no_case_fails() -> None:
    found = Counter[str]()
    for number in range(CASES):
        case = numbered(0, number, BACKENDS, "cpu")
        result = outcome(case, "cpu")
        assert not result.is_failure, f"{result}\n{reproducer(case, 'cpu')}"
        found[result.kind] += 1
        if result.kind == "passed" and case.broken is None:
            found[f"{case.backend} on {result.text}"] += 1
    assert found["rejected"] > 5
    for ran in ("fa2 on fa2", "fa3 on fa3", "auto on fa3", "reference on reference"):
        assert found[ran] > 20, found


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_case_of_hypothesis_fails(data: Any) -> None:
    run(fuzz_case(Drawn(data.draw), **SMALL), "cpu")


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_garbage_raises_nothing_but_what_is_documented(argument: str) -> None:
    """Each word for each argument, beside other arguments that change from word to word."""
    for number, word in enumerate(WORDS):
        case = fuzz_case(Seeded(number), **SMALL)
        case = replace(case, broken=(argument, word), stray=None)
        result = outcome(case, "cpu")
        assert not result.is_failure, f"{result}\n{reproducer(case, 'cpu')}"


def test_cases_reach_the_whole_space(many: list[FuzzCase]) -> None:
    for name, values in VALUES.items():
        if name not in ("view", "group", "qo_len", "kv_len"):
            assert set(values) <= {getattr(case, name) for case in many}, name
    assert all(can_be_judged(case) for case in many)
    assert {case.sm_scale for case in many} >= {1e4, -1e4, 6e4, 1e30, -1e30, 1e-30, -1e-30, 1e-45}
    assert {case.backend for case in many} == set(BACKENDS)
    assert {case.numbers for case in many} == set(NUMBERS)
    assert {layout for case in many for layout in case.layouts} == set(LAYOUTS)
    assert {case.head_dims[n] for case in many for n in (0, 1)} == set(range(8, 257, 8))
    assert {case.stray[:2] for case in many if case.stray} == {
        (tensor, value) for tensor in "qkv" for value in ("nan", "inf", "-inf")
    }
    assert {case.broken[0] for case in many if case.broken} == set(ARGUMENTS)
    dtypes = {case.dtypes for case in many}
    assert {(E4M3, E4M3, E4M3), (BFLOAT16, E5M2, E5M2), (FLOAT16, FLOAT16, FLOAT16)} <= dtypes
    lengths = [length for case in many for length in (case.qo_len, case.kv_len)]
    assert {0, 1, 63, 64, 65, 128, 257} <= set(lengths)
    assert max(lengths) > 4000
    assert sum(length < 600 for length in lengths) > 0.8 * len(lengths)
    assert {1, 7, 16} <= {case.group for case in many}
    assert {0, 1, 2, 3} <= {case.num_splits for case in many}
    assert any(case.sm_scale == 1e30 for case in many)


def test_a_case_prints_as_what_makes_it(many: list[FuzzCase]) -> None:
    for case in many[:500]:
        text = repr(case)
        assert "\n" not in text
        assert '"' not in text
        assert eval(text, {"fuzzed": fuzzed, "torch": torch}) == case


def test_the_line_of_a_case_runs() -> None:
    case = fuzzed(qo_len=3, kv_len=5, mask="causal", backend="fa2", dtypes=(BFLOAT16,) * 3)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        reproducer(case, "cpu"),
        shell=True,
        env=os.environ | {"PATH": path},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "passed: fa2\n"


def test_inputs_are_the_same_each_time() -> None:
    case = fuzzed(numbers="normal", sinks=True, layouts=("fused", "odd address", "dense"))
    one, other = (make_inputs(case, "cpu") for _ in range(2))
    for a, b in zip(one.call.tensors, other.call.tensors, strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


# What a broken kernel does with the results of a right one.
Fault = Any
BEFORE, PAST = -FENCE_BYTES // 8, FENCE_BYTES // 8


def write_beside(x: Tensor, by: int) -> None:
    """An element by so many bytes before the first one of `x`, or behind its last one."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    offset = x.storage_offset() + by // x.element_size() + (last if by > 0 else 0)
    x.as_strided((1,), (1,), offset).fill_(1.0)


FAULTS: dict[str, tuple[FuzzCase, str]] = {
    "one element": (fuzzed(backend="fa3", group=3, mask="causal"), "beyond"),
    "one LSE": (fuzzed(backend="fa2", lse="new", sinks=True), "LSE"),
    "NaN": (fuzzed(backend="fa3", soft_cap=30.0), "NaN in out"),
    "no NaN": (fuzzed(backend="fa2", stray=("k", "nan", 0.5)), "finite, unlike the reference"),
    "infinity": (fuzzed(backend="fa2", stray=("v", "inf", 0.5)), "not finite, unlike"),
    "beside out": (fuzzed(backend="fa3", out="rows", head_dims=(128, 128)), "beside"),
    "before q": (fuzzed(backend="fa3", layouts=("fused",) * 3), "bytes changed"),
    "past the mask": (fuzzed(backend="fa2", mask="bool"), "bytes changed"),
    "not the same twice": (fuzzed(backend="fa3", kv_layout="HND"), "not the same twice"),
    "not written": (fuzzed(backend="fa2", out="wide", qo_len=130), "NaN in out"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, text = FAULTS[name]
    assert outcome(case, "cpu").kind == "passed"
    original, calls = StubKernel.__call__, []

    def faulty(self: StubKernel, backend: str, q: Tensor, *rest: Any) -> None:
        calls.append(1)
        out, lse = rest[2], rest[3]
        original(self, backend, q, *rest)
        middle = tuple(size // 2 for size in out.shape)
        if name == "one element":
            out[middle] += 0.01
        elif name == "one LSE":
            lse[middle[:2]] += 0.01
        elif name in ("NaN", "not written"):
            out[middle] = torch.nan
        elif name == "no NaN":
            out.nan_to_num_()
        elif name == "infinity":
            out[middle[0], 0, 0] = torch.inf
        elif name == "beside out" and len(calls) == 1:
            write_beside(out, PAST)
        elif name == "before q":
            write_beside(q, BEFORE)
        elif name == "past the mask":
            write_beside(rest[7], PAST)
        elif name == "not the same twice" and len(calls) == 2:
            out[middle] *= 1.01

    monkeypatch.setattr(StubKernel, "__call__", faulty)
    result = outcome(case, "cpu")
    assert result.kind == "wrong"
    assert text in result.text


def test_reading_beside_a_tensor_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes a row too many for the last one gets NaN."""
    case = fuzzed(backend="fa3", kv_len=20)
    original = StubKernel.__call__

    def faulty(self: StubKernel, backend: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        offset = v.storage_offset() + v.stride(0)
        original(self, backend, q, k, v.as_strided(v.shape, v.stride(), offset), *rest)

    monkeypatch.setattr(StubKernel, "__call__", faulty)
    assert "NaN in out" in outcome(case, "cpu").text


def test_errors_of_other_types_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fuzzed(backend="reference")

    def faulty(*_: Any) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(ops, "reference_attention", faulty)
    result = outcome(case, "cpu")
    assert result.is_failure
    assert result.kind == "IndexError"
    run(replace(case, broken=("sinks", "list")), "cpu")
    with pytest.raises(AssertionError, match="IndexError: out of range"):
        run(case, "cpu")


def test_a_failure_shrinks_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft cap is dropped where there is a window: of 20 choices these stay."""
    original = reference_attention

    def faulty(request: Any) -> Any:
        if request.window_left >= 0 and request.qo_len > 2:
            request = request._replace(logits_soft_cap=0.0)
        return original(request)

    monkeypatch.setattr(ops, "reference_attention", faulty)
    case = fuzzed(
        backend="reference",
        qo_len=60,
        kv_len=70,
        group=5,
        mask="packed",
        window_left=20,
        soft_cap=0.5,
        sinks=True,
        layouts=("fused", "dense", "odd strides"),
        scale_q="per head",
        lse="transposed",
        out="wide",
        head_dims=(80, 40),
    )
    assert outcome(case, "cpu").kind == "wrong"
    smallest = shrunk(case, lambda c: outcome(c, "cpu").kind == "wrong")
    assert outcome(smallest, "cpu").kind == "wrong"
    plain = fuzzed(backend="reference", window_left=20, soft_cap=0.5, group=1, kv_heads=1)
    assert replace(smallest, qo_len=17, kv_len=63) == plain
    assert smallest.qo_len == 3
    assert smallest.kv_len <= 8


def test_shrinking_ends() -> None:
    case = numbered(3, 5, BACKENDS, "cuda")
    tried = []

    def always(candidate: FuzzCase) -> bool:
        tried.append(candidate)
        return True

    smallest = shrunk(case, always, attempts=1000)
    assert list(simpler(smallest)) == []
    assert len(tried) < 1000
    tried.clear()
    assert shrunk(case, lambda c: not tried.append(c) and False, attempts=3) == case
    assert len(tried) == 3


def test_shrinking_makes_no_case_that_cannot_be_judged() -> None:
    """Numbers whose products float32 rounds, or a bias, beside a factor that shows it."""
    exact = fuzzed(sm_scale=1e30, numbers="exact")
    assert can_be_judged(exact)
    assert all(step.numbers == "exact" or step.sm_scale is None for step in simpler(exact))
    biased = replace(exact, position="ALiBi")
    assert not can_be_judged(biased)
    assert can_be_judged(replace(biased, sm_scale=6e4))
    assert exact in simpler(biased)


def test_fences_keep_values_strides_and_alignment() -> None:
    odd = torch.arange(40, dtype=torch.float16)[3:].view(37, 1, 1).expand(37, 1, 8)
    given = [torch.randn(4, 5, 6).transpose(0, 1), odd, torch.ones(3, 5, dtype=torch.bool)]
    fence = fenced([*given, torch.empty(0, 2, 8, dtype=E5M2)])
    for tensor, moved in zip(given, fence.tensors, strict=False):
        assert torch.equal(tensor, moved)
        assert tensor.stride() == moved.stride()
        assert tensor.data_ptr() % 256 == moved.data_ptr() % 256
    assert fence.tensors[3].shape == (0, 2, 8)
    assert not fence.written([]).any()
    fence.tensors[0][1, 2, 3] = 9.0
    assert fence.written([]).sum() > 0
    assert not fence.written([0]).any()
    write_beside(fence.tensors[2], 1)
    assert fence.written([0]).sum() == 1


# A worker of its own dies, hangs, answers wrongly or prints what is no answer at some of its cases.
PROGRAM = """
import os, sys, time
sys.path[:0] = {path!r}
import fuzz
from fuzz_check import Outcome

def outcome(case, device):
    if case == fuzz.numbered(0, 3, fuzz.BACKENDS, "cpu"):
        os.abort()
    if case == fuzz.numbered(0, 5, fuzz.BACKENDS, "cpu"):
        time.sleep(1000)
    if case == fuzz.numbered(0, 6, fuzz.BACKENDS, "cpu"):
        return Outcome("wrong", "on purpose")
    if case == fuzz.numbered(0, 7, fuzz.BACKENDS, "cpu"):
        for line in ("a library's notice", "[1, 2]", "7", "NaN", ""):
            print(line, flush=True)
    return Outcome("passed", "reference")

fuzz.outcome = outcome
fuzz.__file__ = __file__
sys.exit(fuzz.main(sys.argv[1:]))
"""


def test_a_worker_may_die_or_hang(tmp_path: Path) -> None:
    program, summary = tmp_path / "program.py", tmp_path / "summary.json"
    program.write_text(PROGRAM.format(path=[str(Path(__file__).parent), *sys.path]))
    given = ["--device=cpu", "--cases=8", "--jobs=1", "--limit=10", "--shrink=0"]
    done = subprocess.run(
        [sys.executable, str(program), *given, f"--json={summary}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(summary.read_text())
    assert result["cases"] == 8
    assert result["outcomes"]["failed"] == 3
    kinds = {failure["number"]: failure["kind"] for failure in result["failures"]}
    assert kinds == {3: "crash", 5: "hang", 6: "wrong"}
    assert all("fuzzed(" in failure["smallest"] for failure in result["failures"])
    assert "FAILED, case 5, hang: no answer in 10.0 s" in done.stdout


def test_what_ends_the_watch_over_a_worker_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object) -> int:
        raise OSError("no more processes")

    monkeypatch.setattr(fuzz.Worker, "_one_process", no_process)
    with pytest.raises(RuntimeError, match="cannot be followed") as raised:
        fuzz.main(["--device=cpu", "--cases=4", "--jobs=2"])
    assert isinstance(raised.value.__cause__, OSError)


def test_a_run_without_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.json"
    given = ["--device=cpu", "--cases=6", "--jobs=2", "--seed=3", "--backend=reference"]
    assert fuzz.main([*given, f"--json={summary}"]) == 0
    result = json.loads(summary.read_text())
    assert result["cases"] == sum(result["outcomes"].values()) == 6
    assert result["failures"] == []
    assert set(result["ran_on"]) == {"reference"}
    assert json.loads(capsys.readouterr().out)["cases"] == 6
