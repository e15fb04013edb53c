"""The soak test without a GPU: it runs through, and each check sees what it is for."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import soak
from prefill import ops
from prefill.reference import reference_attention
from soak import CASES, CHECKS, Setting


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    names = ("causal", "bool mask")
    monkeypatch.setattr(soak, "CASES", {name: CASES[name] for name in names})
    made = Setting("reference", "cpu", seconds=0.5, repeats=300, threads=4, streams=2)
    made.make_calls()
    assert [call.name for call in made.calls] == list(names)
    return made


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: CASES[name] for name in ("packed mask", "RoPE", "copies")}
    monkeypatch.setattr(soak, "CASES", few)
    summary = tmp_path / "soak.json"
    options = ["--device=cpu", "--seconds=0.5", "--repeats=3", f"--json={summary}"]
    assert soak.main(options) == 0
    checks = {row["check"]: row for row in json.loads(summary.read_text())["checks"]}
    assert list(checks) == list(CHECKS)
    for name, row in checks.items():
        assert row["wrong"] == []
        assert (row["compared"] > 0) == (row["note"] == ""), name
    assert checks["repeats"]["compared"] == 3 * len(few)
    assert checks["failures"]["compared"] == 50 * len(few)


@pytest.mark.parametrize("check", ["concurrency", "repeats", "failures"])
def test_a_bit_now_and_then_is_seen(
    check: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(1)

    def faulty(request: Any) -> Any:
        out, lse = reference_attention(request)
        if chosen.random() < 0.03:
            out.view(torch.int16)[-1, -1, -1] ^= 1
        return out, lse

    monkeypatch.setattr(ops, "reference_attention", faulty)
    finding = CHECKS[check](setting)
    assert finding.compared > 0
    assert any("differ" in text for text in finding.wrong)


def test_shared_scratch_is_seen(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """What concurrency is there for: a buffer that all threads use at once."""
    shared: dict[torch.Size, torch.Tensor] = {}
    turn = threading.Event()

    def faulty(request: Any) -> Any:
        out, lse = reference_attention(request)
        scratch = shared.setdefault(torch.Size((1 << 20,)), torch.zeros(1 << 20))
        scratch[: out.numel()] = out.flatten().float()
        turn.wait(0.001)  # another thread's results arrive
        return scratch[: out.numel()].view(out.shape).to(out.dtype), lse

    monkeypatch.setattr(ops, "reference_attention", faulty)
    assert CHECKS["concurrency"](setting).wrong


def test_an_error_in_a_thread_is_seen(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.current_thread()

    def faulty(request: Any) -> Any:
        if threading.current_thread() is not main:
            raise RuntimeError("not in a thread")
        return reference_attention(request)

    monkeypatch.setattr(ops, "reference_attention", faulty)
    finding = CHECKS["concurrency"](setting)
    assert any("RuntimeError: not in a thread" in text for text in finding.wrong)


def test_compiled_code_that_differs_is_seen(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(request: Any) -> Any:
        out, lse = reference_attention(request)
        return (out + 1 if torch.compiler.is_compiling() else out), lse

    monkeypatch.setattr(ops, "reference_attention", faulty)
    assert CHECKS["ways"](setting).wrong == [
        f"{call.name}: compiled differs from eager" for call in setting.calls
    ]


def test_a_process_that_fails_is_seen(setting: Setting) -> None:
    setting.backend = "fa3"  # needs a GPU
    assert CHECKS["processes"](setting).wrong == ["spawn: the child ended with 1"]
