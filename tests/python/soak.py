"""Soak test: a machine that does much else must get the same bits, for as long as it likes.

    python tests/python/soak.py --seconds 600 --repeats 10000 --json soak.json

Each check runs the same set of calls on each backend: in threads and streams at once beside copies
and products, many times over, from eager code, CUDA graphs and compiled code, in forked and spawned
processes, after calls that fail, on a second GPU where there is one. Exits with 1 if anything
differs by a bit. `--device cpu` drives it on the reference.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor

from cases import BFLOAT16, E4M3, E5M2, FLOAT16
from exactness import normal
from fuzz_cases import FuzzCase, fuzzed
from fuzz_check import make_inputs, outcome, synchronize
from garbage import ARGUMENTS, DOCUMENTED, WORDS, garbage
from prefill import single_prefill_with_kv_cache

CASES: dict[str, FuzzCase] = {
    "causal": fuzzed(qo_len=257, kv_len=700, mask="causal", lse="new", group=4),
    "full": fuzzed(qo_len=513, kv_len=1025, dtypes=(BFLOAT16,) * 3, head_dims=(128, 128)),
    "one row, split": fuzzed(qo_len=1, kv_len=8192, group=8, lse="new", head_dims=(128, 128)),
    "few rows, split": fuzzed(qo_len=64, kv_len=8192, mask="causal", lse="new", group=4),
    "192/128": fuzzed(qo_len=200, kv_len=900, mask="causal", head_dims=(192, 128)),
    "256": fuzzed(qo_len=130, kv_len=600, head_dims=(256, 256), dtypes=(BFLOAT16,) * 3),
    "bool mask": fuzzed(qo_len=300, kv_len=1025, mask="bool, rows apart", lse="new"),
    "packed mask": fuzzed(qo_len=131, kv_len=777, mask="packed, odd address", soft_cap=30.0),
    "window": fuzzed(qo_len=500, kv_len=1500, mask="causal", window_left=100, sinks=True),
    "ALiBi": fuzzed(qo_len=100, kv_len=900, position="ALiBi", group=3, lse="new"),
    "RoPE": fuzzed(qo_len=257, kv_len=700, position="RoPE", mask="causal", kv_layout="HND"),
    "float8 keys": fuzzed(qo_len=100, kv_len=700, dtypes=(FLOAT16, E4M3, E5M2), scale_k="per head"),
    "float8": fuzzed(qo_len=257, kv_len=700, dtypes=(E4M3,) * 3, scale_q="per head"),
    "float32": fuzzed(qo_len=257, kv_len=700, o_dtype="float32", mask="causal", lse="new"),
    "float8 to float16, split": fuzzed(
        qo_len=3, kv_len=8192, dtypes=(E5M2, E4M3, E5M2), o_dtype="other 16 bits", group=4
    ),
    "copies": fuzzed(layouts=("odd strides", "last dim apart", "odd address"), qo_len=90),
}
BREAKABLE = [name for name in ARGUMENTS if name not in ("q", "k", "v", "out", "lse")]
"""Arguments that may be garbage: not those through which a legal call could change the inputs."""
SMALL = 40
"""Lengths on the CPU."""
VARIANTS = 4
"""Sets of data that graphs are replayed with."""


@dataclass
class Ready:
    """A call whose tensors are there."""

    name: str
    tensors: tuple[Tensor, ...]
    arguments: dict[str, Any]

    def __call__(self) -> tuple[Tensor, ...]:
        return self.on(self.tensors)

    def on(self, tensors: tuple[Tensor, ...], **changes: Any) -> tuple[Tensor, ...]:
        result = single_prefill_with_kv_cache(*tensors, **(self.arguments | changes))
        return result if isinstance(result, tuple) else (result,)


@dataclass
class Setting:
    """Where the checks run, for how long, and the calls that the backend takes."""

    backend: str
    device: str
    seconds: float
    repeats: int
    threads: int
    streams: int
    calls: list[Ready] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    def make_calls(self) -> None:
        for name, case in CASES.items():
            chosen = replace(case, backend=self.backend)
            if not self.is_cuda:
                lengths = (min(SMALL, chosen.qo_len), min(SMALL, chosen.kv_len))
                chosen = replace(chosen, qo_len=lengths[0], kv_len=lengths[1])
            found = outcome(chosen, self.device)
            assert not found.is_failure, f"{name}: {found}"
            if found.kind == "refused":
                self.refused.append(name)
                continue
            call = make_inputs(chosen, self.device).call
            arguments = call.arguments | {"backend": self.backend}
            self.calls.append(Ready(name, call.tensors, arguments))

    def stream(self) -> AbstractContextManager[Any]:
        """A stream of its own, entered as often as one likes."""
        if not self.is_cuda:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))


@dataclass
class Finding:
    """How many results a check compared, and what was wrong."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    note: str = ""


def differences(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
    """How many bytes differ, on the device: nothing waits for it."""
    counts = [
        (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()
        for a, b in zip(one, other, strict=True)
    ]
    return torch.stack(counts).sum()


class Load:
    """Copies between host and device and products, on streams of their own, until closed."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.ended = setting, threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Load:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        synchronize(self.setting.device)

    def _work(self) -> None:
        cuda = self.setting.is_cuda
        size = 2048 if cuda else 16
        host = torch.ones(1 << 22 if cuda else 16, pin_memory=cuda)
        there = host.to(self.setting.device)
        square = torch.rand(size, size, device=self.setting.device)
        stream = self.setting.stream()
        while not self.ended.is_set():
            with stream:
                there.copy_(host, non_blocking=True)
                square = (square @ square).clamp(-1, 1)
                host.copy_(there, non_blocking=True)
                if cuda:
                    torch.cuda.current_stream(self.setting.device).synchronize()


def concurrency(setting: Setting) -> Finding:
    """Threads of several streams each, mixed calls, copies beside: the bits of serial calls."""
    expected = [call() for call in setting.calls]
    synchronize(setting.device)
    finding, lock = Finding(), threading.Lock()
    end = time.monotonic() + setting.seconds

    def work(thread: int) -> None:
        chosen = random.Random(thread)
        streams = [setting.stream() for _ in range(setting.streams)]
        wrong = torch.zeros(
            len(streams), len(setting.calls), dtype=torch.int64, device=setting.device
        )
        synchronize(setting.device)
        compared = 0
        try:
            while time.monotonic() < end:
                for number, stream in enumerate(streams):
                    which = chosen.randrange(len(setting.calls))
                    with stream:
                        result = setting.calls[which]()
                        wrong[number, which] += differences(result, expected[which])
                compared += len(streams)
                if compared % (16 * len(streams)) == 0:
                    synchronize(setting.device)
            synchronize(setting.device)
            texts = [
                f"thread {thread}: {call.name} differs from the serial result"
                for call, bytes_wrong in zip(setting.calls, wrong.sum(0).tolist(), strict=True)
                if bytes_wrong
            ]
        except Exception as error:  # a thread's own would be lost
            texts = [f"thread {thread}: {type(error).__name__}: {error}"]
        with lock:
            finding.compared += compared
            finding.wrong += texts

    with Load(setting):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(setting.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return finding


def repeats(setting: Setting) -> Finding:
    """Each call many times over under load: the bits of the first."""
    finding = Finding()
    with Load(setting):
        for call in setting.calls:
            first = call()
            wrong = torch.zeros((), dtype=torch.int64, device=setting.device)
            for number in range(setting.repeats):
                wrong += differences(call(), first).clamp(max=1)
                if number % 256 == 255:
                    synchronize(setting.device)
            finding.compared += setting.repeats
            if count := int(wrong):
                finding.wrong.append(f"{call.name}: {count} of {setting.repeats} differ")
    return finding


def captured(call: Ready) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def ways(setting: Setting) -> Finding:
    """The same bits from eager code, a CUDA graph and compiled code."""
    finding = Finding()
    compiler = "inductor" if setting.is_cuda else "aot_eager"
    for call in setting.calls:
        eager = tuple(x.clone() for x in call())
        torch._dynamo.reset()
        found = {"compiled": torch.compile(call.on, fullgraph=True, backend=compiler)(call.tensors)}
        if setting.is_cuda:
            graph, result = captured(call)
            for x in result:
                x.view(torch.uint8).fill_(0xFF)
            graph.replay()
            found["graph"] = result
        for way, result in found.items():
            finding.compared += 1
            if differences(eager, result):
                finding.wrong.append(f"{call.name}: {way} differs from eager")
    return finding


def replays(setting: Setting) -> Finding:
    """A graph replayed with other data has what eager code makes of them."""
    if not setting.is_cuda:
        return Finding(note="skipped: no CUDA graphs on the CPU")
    finding, chosen = Finding(), random.Random(0)
    for call in setting.calls:
        graph, result = captured(call)
        data = [
            [
                normal(*x.shape, dtype=x.dtype, seed=10 * n + m, device=setting.device)
                for m, x in enumerate(call.tensors)
            ]
            for n in range(VARIANTS)
        ]
        expected = [tuple(y.clone() for y in _with_data(call, tensors)) for tensors in data]
        wrong = torch.zeros((), dtype=torch.int64, device=setting.device)
        for _ in range(max(1, setting.repeats // 10)):
            which = chosen.randrange(VARIANTS)
            for target, source in zip(call.tensors, data[which], strict=True):
                target.copy_(source)
            for x in result:
                x.view(torch.uint8).fill_(0xFF)
            graph.replay()
            wrong += differences(result, expected[which]).clamp(max=1)
            finding.compared += 1
        if count := int(wrong):
            finding.wrong.append(f"{call.name}: {count} replays differ")
    return finding


def _with_data(call: Ready, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    for target, source in zip(call.tensors, tensors, strict=True):
        target.copy_(source)
    return call()


FORK = """
    import os, torch, prefill
    if {device!r} != "cpu":
        torch.ones(1, device={device!r})
    child = os.fork()
    if child == 0:
        q = torch.ones(5, 2, 64, dtype=torch.float16)
        out = prefill.single_prefill_with_kv_cache(q, q, q, causal=True)
        os._exit(0 if bool((out == 1).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def processes(setting: Setting) -> Finding:
    """A forked child works on the CPU, even if its parent used the GPU; a spawned one anywhere."""
    finding = Finding(compared=2)
    program = textwrap.dedent(FORK.format(device=setting.device))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        finding.wrong.append(f"fork: {done.stderr[-1000:]}")
    child = multiprocessing.get_context("spawn").Process(
        target=spawned, args=(setting.backend, setting.device)
    )
    child.start()
    child.join(300)
    if child.exitcode != 0:
        child.kill()
        finding.wrong.append(f"spawn: the child ended with {child.exitcode}")
    return finding


def spawned(backend: str, device: str) -> None:
    """What the spawned child does."""
    q = torch.ones(5, 2, 64, dtype=torch.float16, device=device)
    assert (single_prefill_with_kv_cache(q, q, q, causal=True, backend=backend) == 1).all()


def failures(setting: Setting) -> Finding:
    """After a call that fails, also within the capture of a graph, the next one is right."""
    finding, chosen = Finding(), random.Random(0)
    for call in setting.calls:
        expected = call()
        wrong = torch.zeros((), dtype=torch.int64, device=setting.device)
        for _ in range(50):
            name, word = chosen.choice(BREAKABLE), chosen.choice(WORDS)
            broken = {name: garbage(word, call.tensors[0])}
            with suppress(DOCUMENTED):
                call.on(call.tensors, **broken)
            wrong += differences(call(), expected)
            finding.compared += 1
        if setting.is_cuda:
            with suppress(TypeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                call.on(call.tensors, sm_scale="large")
            wrong += differences(call(), expected)
            finding.compared += 1
        if int(wrong):
            finding.wrong.append(f"{call.name}: differs after a call that failed")
    return finding


def second_gpu(setting: Setting) -> Finding:
    """The same bits on another device, which is not the current one."""
    if not setting.is_cuda or torch.cuda.device_count() < 2:
        return Finding(note="skipped: no second GPU")
    finding = Finding()
    for call in setting.calls:
        expected = call()
        there = {
            name: x.to("cuda:1") if isinstance(x, Tensor) else x
            for name, x in call.arguments.items()
        }
        moved = Ready(call.name, tuple(x.to("cuda:1") for x in call.tensors), there)
        for _ in range(10):
            result, here = moved(), call()
            finding.compared += 2
            back = tuple(x.to(setting.device) for x in result)
            if differences(back, expected) or differences(here, expected):
                finding.wrong.append(f"{call.name}: differs on {result[0].device}")
                break
    return finding


CHECKS: dict[str, Callable[[Setting], Finding]] = {
    "concurrency": concurrency,
    "repeats": repeats,
    "ways": ways,
    "replays": replays,
    "processes": processes,
    "failures": failures,
    "second_gpu": second_gpu,
}


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="of concurrency, per backend")
    parser.add_argument("--repeats", type=int, default=10_000, help="of each call")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8, help="of each thread")
    parser.add_argument("--backend", choices=["fa2", "fa3", "reference"], action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", choices=CHECKS, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="where the summary goes, beside the screen")
    args = parser.parse_args(given)
    natural = ["reference"] if args.device == "cpu" else ["fa3", "fa2"]
    summary: dict[str, Any] = {"torch": torch.__version__, "device": args.device, "checks": []}
    if args.device != "cpu":
        summary["device"] = torch.cuda.get_device_name(args.device)
    failed = False
    backends, checks = args.backend or natural, args.check or list(CHECKS)
    for backend in backends:
        numbers = (args.seconds, args.repeats, args.threads, args.streams)
        setting = Setting(backend, args.device, *numbers)
        setting.make_calls()
        for name in checks:
            start = time.monotonic()
            finding = CHECKS[name](setting)
            failed |= bool(finding.wrong)
            row = {
                "backend": backend,
                "check": name,
                "seconds": round(time.monotonic() - start, 1),
                "calls": len(setting.calls),
                "refused": setting.refused,
                **vars(finding),
            }
            summary["checks"].append(row)
            print(json.dumps(row), flush=True)
            summary["missing"] = len(backends) * len(checks) - len(summary["checks"])
            if args.json:  # what is done is kept if the run is stopped
                args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
