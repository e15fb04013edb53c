"""What an eager call costs on the host: the time until it returns, on a problem of no size."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from prefill.api import single_prefill_with_kv_cache
from prefill.bench.cases import FULL_AND_CAUSAL, Case, Heads, Inputs, Length
from prefill.bench.contenders import Contender, attempt
from prefill.bench.timing import statistics

CASE = Case(Heads(8, 2, 128, 128), Length(64, 64), "causal", FULL_AND_CAUSAL["causal"], torch.half)
CALLS = 4000
BATCH = 200  # calls between synchronisations, fewer than the driver queues


def host_times(contenders: Mapping[str, Contender], device: torch.device) -> dict[str, Any]:
    """Statistics in seconds, or the reason, by name.

    The forced backends write into a given output, as when they are timed on the GPU; "auto" is the
    plain call, which allocates, as SDPA and FlashInfer do.
    """
    inputs = CASE.inputs(device, CASE.arguments(device), 0)

    def auto() -> None:
        single_prefill_with_kv_cache(inputs.q, inputs.k, inputs.v, causal=True)

    results: dict[str, Any] = {"auto": measure(auto, torch.cuda.synchronize)}
    for name, contender in contenders.items():
        result, reason = attempt(contender, partial(_measure_contender, contender, inputs))
        results[name] = {"refused": reason} if result is None else result
    return results


def _measure_contender(contender: Contender, inputs: Inputs) -> dict[str, Any]:
    return measure(contender.prepare(CASE, inputs), torch.cuda.synchronize)


def measure(
    call: Callable[[], object],
    synchronize: Callable[[], object],
    calls: int = CALLS,
    batch: int = BATCH,
) -> dict[str, Any]:
    """Time each call by itself; the GPU is waited for between batches, outside the time."""
    for _ in range(batch):
        call()
    clock = time.perf_counter
    seconds = []
    for _ in range(calls // batch):
        synchronize()
        for _ in range(batch):
            began = clock()
            call()
            seconds.append(clock() - began)
    synchronize()
    return statistics(seconds)._asdict()
