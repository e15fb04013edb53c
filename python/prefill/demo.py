"""`python -m prefill demo`: the example of the function's document, and a real model's activations.

Each case runs on every backend that takes it here. Errors are against attention computed in float64
from the same inputs, by a few lines of torch below or, for the activations, by the file's author.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefill.api import explain, single_prefill_with_kv_cache_return_lse
from prefill.backends import PRIORITY
from prefill.data import load_real_activations
from prefill.devices import device_here
from prefill.explain import Explanation
from prefill.text import table

TOLERANCE = 1e-3
"""The document's: its example compares with torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)."""
LSE_TOLERANCE = 1e-3
"""Base-2 LSE of fp32 logits up to 30: 2^-19 of them, with room."""


@dataclass(frozen=True)
class Case:
    """A call and what it should give."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    arguments: dict[str, Any]
    out: Tensor
    lse: Tensor


def run(device_name: str | None = None) -> int:
    """Print both tables; 0 if every result is right, else 1; 2 without such a device."""
    try:
        device = device_here(device_name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    passed = _example(device)
    print()
    passed = _real(device) and passed
    print()
    print("all results agree" if passed else "SOME RESULTS ARE WRONG: see above")
    return 0 if passed else 1


def _example(device: torch.device) -> bool:
    qo_len, kv_len = (128, 4096) if device.type == "cuda" else (32, 512)
    heads, kv_heads, head_dim = (32, 4, 128) if device.type == "cuda" else (8, 2, 128)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, count, head_dim, generator=generator).half().to(device)
        for length, count in ((qo_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
    )
    mask = torch.tril(torch.full((qo_len, kv_len), True, device=device), diagonal=kv_len - qo_len)
    out, lse = _attention_in_float64(q, k, v, mask, head_dim**-0.5)
    print(
        f"The document's example: q [{qo_len}, {heads}, {head_dim}], "
        f"k and v [{kv_len}, {kv_heads}, {head_dim}], float16, {_device_text(device)}"
    )
    calls: list[tuple[str, dict[str, Any]]] = [
        ("causal, fp16 reduction", {"causal": True, "use_fp16_qk_reduction": True}),
        ("causal", {"causal": True}),
        ("custom mask", {"custom_mask": mask}),
    ]
    rows, results, passed = [], [], True
    for name, arguments in calls:
        row, result, good = _rows(Case(name, q, k, v, arguments, out, lse))
        rows += row
        results += result
        passed = passed and good
    print(table(HEADERS, rows))
    agree = all(torch.allclose(results[0], r, rtol=TOLERANCE, atol=TOLERANCE) for r in results)
    print(
        f"torch.allclose of the causal and the masked outputs, rtol and atol {TOLERANCE}: {agree}"
    )
    return passed and agree


def _real(device: torch.device) -> bool:
    real = load_real_activations()
    q, k, v = real.q.to(device), real.k.to(device), real.v.to(device)
    print(
        f"Real activations (SmolLM2-135M, layer 9): q {list(q.shape)}, k and v {list(k.shape)}, "
        f"float16, causal, {_device_text(device)}"
    )
    arguments = {"causal": True, "sm_scale": real.sm_scale}
    out, lse = real.o_ref.to(device), real.lse2_ref.to(device)
    rows, _, passed = _rows(Case("causal", q, k, v, arguments, out, lse))
    print(table(HEADERS, rows))
    return passed


HEADERS = ("call", "backend", "max error", "LSE error", "time", "why")


def _rows(case: Case) -> tuple[list[list[str]], list[Tensor], bool]:
    """A line for the backend that auto takes, and one for each other that can run the call."""
    chosen = explain(case.q, case.k, case.v, **case.arguments)
    names = [chosen.backend] + [
        backend.name
        for backend in PRIORITY
        if backend.name not in chosen.rejected and backend.name != chosen.backend
    ]
    rows, results, passed = [], [], True
    for number, name in enumerate(names):
        arguments = case.arguments | ({} if number == 0 else {"backend": name})

        def call(arguments: dict[str, Any] = arguments) -> tuple[Tensor, Tensor]:
            return single_prefill_with_kv_cache_return_lse(case.q, case.k, case.v, **arguments)

        out, lse = call()
        error = (out.double() - case.out).abs().max().item()
        lse_error = (lse.double() - case.lse).abs().max().item()
        good = (
            torch.allclose(out.double(), case.out.double(), rtol=TOLERANCE, atol=TOLERANCE)
            and lse_error <= LSE_TOLERANCE
        )
        why = _why(chosen) if number == 0 else "named by the caller"
        rows.append(
            [
                case.name,
                str(name),
                f"{error:.1e}" + ("" if good else " WRONG"),
                f"{lse_error:.1e}",
                _time_text(_seconds(call, case.q.device)),
                why,
            ]
        )
        results.append(out)
        passed = passed and good
    return rows, results, passed


def _why(chosen: Explanation) -> str:
    against_others = [reason for reasons in chosen.rejected.values() for reason in reasons]
    return "; ".join(against_others) or chosen.reason


def _attention_in_float64(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q.double(), k) * sm_scale
    logits = logits.masked_fill(~mask, -torch.inf)
    out = torch.einsum("hij,jhd->ihd", torch.softmax(logits, -1), v)
    log2_e = torch.tensor(2.0).double().log().reciprocal()
    return out, (torch.logsumexp(logits, -1) * log2_e.item()).t()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time per call, back to back: on a GPU its own clock, else the best of a few."""
    if device.type != "cuda":
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - began)
        return best
    repeats = 20
    with torch.cuda.device(device):
        start: Any
        end: Any
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        call()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _device_text(device: torch.device) -> str:
    if device.type == "cuda":
        return f"on {torch.cuda.get_device_name(device)}"
    return f"on the {device.type}"
