"""Measure what a call costs on the host beyond the op itself.

On a GPU the native op runs, on a tiny problem; the added time is that of the public call less that
of `torch.empty` and the bare op. Without one, a function that does nothing stands in for the op and
CPU tensors for CUDA tensors. Each figure is the least over many short batches, so that the load of
other processes does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import prefill
from prefill import backends, ops, request, support


def microseconds(function: Callable[[], Any], batches: int = 300, batch: int = 100) -> float:
    cuda = torch.cuda.is_available()
    best = float("inf")
    for _ in range(batches):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            function()
        best = min(best, time.perf_counter() - start)
    return best / batch * 1e6


def stand_in() -> None:
    """Let CPU tensors pass for those of a compute capability 9.0 device with the full build."""
    from fakes import cuda, library

    real, pretended = support.device_info, cuda(9, 0)

    def device_info(device: torch.device) -> support.DeviceInfo:
        real(device)
        return pretended

    support.device_info = device_info  # type: ignore[assignment]
    support._native = library()
    ops._attention = lambda *_: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    as_json = parser.parse_args().json
    native = torch.cuda.is_available() and support.native().build is not None
    if not native:
        stand_in()
    device = "cuda" if native else "cpu"
    q = torch.randn(16, 8, 128, device=device).half()
    k, v = (torch.randn(64, 2, 128, device=device).half() for _ in range(2))
    out = torch.empty_like(q)
    k_hnd, v_hnd = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    call = prefill.single_prefill_with_kv_cache
    checked = request.make_request(q, k, v, causal=True)
    info = support.device_info(q.device)
    backend = backends.resolve(checked, info)

    def bare() -> None:
        result = torch.empty((16, 8, 128), dtype=torch.float16, device=q.device)
        nothing = (None,) * 7
        no_rope = (False, False, 1.0, 1e4)
        factors = (0.0, 0.088, 1.0, 1.0)
        ops._attention(backend, q, k, v, result, *nothing, -1, 0, *no_rope, *factors, 0)

    rows: dict[str, float] = {
        "torch.empty and the bare op": microseconds(bare),
        "call": microseconds(lambda: call(q, k, v, causal=True)),
        "call, out given": microseconds(lambda: call(q, k, v, causal=True, out=out)),
        "call, HND": microseconds(lambda: call(q, k_hnd, v_hnd, causal=True, kv_layout="HND")),
        "call, LSE": microseconds(lambda: call(q, k, v, causal=True, return_lse=True)),
        "make_request": microseconds(lambda: request.make_request(q, k, v, causal=True)),
        "resolve": microseconds(lambda: backends.resolve(checked, info)),
    }
    rows["added by a call"] = rows["call"] - rows["torch.empty and the bare op"]
    if as_json:
        import json

        print(json.dumps({"native": native, "backend": backend, "microseconds": rows}))
        return
    print(f"op: {backend if native else 'none (stand-in)'}, torch {torch.__version__}, {info}")
    for name, value in rows.items():
        print(f"{name:<30} {value:7.2f} us")


if __name__ == "__main__":
    main()
