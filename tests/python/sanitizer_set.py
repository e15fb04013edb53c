"""The calls that `scripts/sanitize` runs under compute-sanitizer: every kernel, every pass, small.

    python tests/python/sanitizer_set.py [--check | --fuzz CALLS] [--without VARIANT]

Each row of the kernel table meets each of `VARIANTS` and tensors of float8, which between them take
all of its score variants, all masks, sinks, rotation, widening of k and v alone and of all three,
transposing v for a row of float8, splitting, merging into every output dtype and packed heads, in
tiles that are full, ragged and alone. Tensors are allocations of their own, without fences: the
sanitizer sees what is read beside them. `--check` holds the results against float64 instead.
`--fuzz` makes random calls of `fuzz_cases.py`, also malformed ones, in place of the set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from cases import BFLOAT16, E4M3, E5M2, make_call, make_tensors, placed
from combinations import Seeded
from fuzz_cases import FuzzCase, fuzz_case, fuzzed
from fuzz_check import outcome, synchronize
from garbage import DOCUMENTED, garbage
from prefill import single_prefill_with_kv_cache, support
from prefill.support import Kernel
from split_cases import split_attention

EVERYTHING: dict[str, Any] = {
    "soft_cap": 30.0,
    "position": "ALiBi",
    "sinks": True,
    "scale_q": "per head",
    "scale_k": "per head",
    "scale_v": "per head",
    "lse": "transposed",
    "out": "wide",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"qo_len": 128, "kv_len": 384, "lse": "new"},
    "one row": {"qo_len": 1, "kv_len": 1, "lse": "new"},
    "causal": {"qo_len": 150, "kv_len": 300, "mask": "causal"},
    "rows without keys": {"qo_len": 200, "kv_len": 70, "mask": "causal", "lse": "new"},
    "window": {"qo_len": 70, "kv_len": 400, "mask": "causal", "window_left": 90},
    "bool mask": {"qo_len": 67, "kv_len": 201, "mask": "bool, rows apart", "window_left": 120},
    "packed mask": {"qo_len": 67, "kv_len": 201, "mask": "packed, odd address", "lse": "new"},
    "everything": {"qo_len": 131, "kv_len": 259, "mask": "bool", **EVERYTHING},
    "split": {"qo_len": 9, "kv_len": 700, "group": 4, "num_splits": 3, "lse": "new"},
    "split, everything": {"qo_len": 40, "kv_len": 600, "mask": "packed", "num_splits": 5}
    | EVERYTHING,
    "rotated": {"qo_len": 75, "kv_len": 150, "position": "RoPE", "mask": "causal", "group": 3},
    "views": {
        "qo_len": 75,
        "kv_len": 150,
        "kv_layout": "HND",
        "layouts": ("fused", "in a cache of heads first", "wide heads"),
    },
    "copies": {
        "qo_len": 33,
        "kv_len": 65,
        "layouts": ("odd strides", "last dim apart", "odd address"),
        "out": "odd strides",
        "mask": "bool, columns apart",
    },
    "float32": {
        "qo_len": 131,
        "kv_len": 259,
        "mask": "causal",
        "o_dtype": "float32",
        "out": "wide",
    },
    "other 16 bits": {"qo_len": 75, "kv_len": 150, "mask": "packed", "sinks": True}
    | {"o_dtype": "other 16 bits", "lse": "rows"},
    "float32, split": {"qo_len": 9, "kv_len": 700, "group": 4, "num_splits": 3}
    | {"o_dtype": "float32", "lse": "new"},
}
WIDENED = ((E4M3, E5M2), (E5M2, E4M3))
"""float8 k and v, of a q of 16 bits or of the dtype of v."""


def cases_of(kernel: Kernel) -> Iterator[tuple[str, FuzzCase]]:
    """The named cases of a row; head dims of its class, and 16 bytes less."""
    dtype = getattr(torch, kernel.dtype)
    dims = (kernel.head_dim_qk, kernel.head_dim_vo)
    plain = fuzzed(backend=kernel.backend, dtypes=(dtype,) * 3, head_dims=dims)
    is_float8 = dtype in (E4M3, E5M2)
    for name, choices in VARIANTS.items():
        if not (is_float8 and name == "rotated"):  # which is another row's
            yield name, replace(plain, **choices)
    fewer = 16 // dtype.itemsize
    ragged = (dims[0] - fewer, dims[1] - fewer)
    yield "narrow heads", replace(plain, head_dims=ragged, **VARIANTS["causal"])
    if is_float8:
        return
    short = replace(plain, qo_len=70, kv_len=150)
    for k, v in WIDENED:
        widened = replace(short, dtypes=(dtype, k, v), scale_v="per head")
        yield f"widened {k}, {v}", widened
    yield "widened and rotated", replace(widened, position="RoPE, scaled", mask="packed")
    # Of a float8 q that is widened this row's kernel is the one for its own output.
    o_dtype = "default" if dtype == BFLOAT16 else "other 16 bits"
    for k, v in WIDENED:
        float8 = replace(short, dtypes=(v, k, v), o_dtype=o_dtype, scale_q="per head")
        yield f"float8 {v}, {k}, {v}", float8
        yield f"float8 {v}, {k}, {v}, rotated", replace(float8, position="RoPE", mask="causal")
    yield "float8, narrow heads, rotated", replace(float8, position="RoPE", head_dims=ragged)


def random_cases(count: int, seed: int, backends: tuple[str, ...]) -> Iterator[FuzzCase]:
    """Small ones: a sanitizer is slow."""
    for number in range(count):
        yield fuzz_case(Seeded(seed * 1_000_003 + number), backends, longest=600, scores=200_000)


def launch(case: FuzzCase, device: str) -> None:
    """Make the call; what a malformed one raises is of no interest here."""
    tensors = make_tensors(case, device)
    call = make_call(case, device, tensors)
    q, k, v = (
        placed(x, layout, "NHD" if x is tensors[0] else case.kv_layout)
        for x, layout in zip(tensors, case.layouts, strict=True)
    )
    attention: Any = single_prefill_with_kv_cache
    if case.num_splits:
        attention = partial(split_attention, num_splits=case.num_splits)
    arguments = {"q": q, "k": k, "v": v, "backend": case.backend} | call.arguments
    if case.broken is None:
        attention(**arguments)
    else:
        name, word = case.broken
        with suppress(*DOCUMENTED):
            single_prefill_with_kv_cache(**arguments | {name: garbage(word, q)})
    synchronize(device)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", help="one backend's kernels; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true", help="compare the results with float64")
    parser.add_argument("--fuzz", type=int, metavar="CALLS", help="random calls instead")
    parser.add_argument("--seed", type=int, default=1, help="of these")
    parser.add_argument("--without", choices=VARIANTS, help="all but these calls")
    args = parser.parse_args(given)
    build = support.native().build
    assert build is not None, support.native().missing
    kernels = [kernel for kernel in build.kernels if args.backend in (None, kernel.backend)]
    if args.fuzz:
        backends = tuple(dict.fromkeys(kernel.backend for kernel in kernels))
        cases = [("random", case) for case in random_cases(args.fuzz, args.seed, backends)]
    else:
        cases = [
            (f"{row.name}, {name}", case)
            for row in kernels
            for name, case in cases_of(row)
            if name != args.without
        ]
    wrong = []
    for name, case in cases:
        if not args.check:
            launch(case, args.device)
        elif (found := outcome(case, args.device)).kind != "passed":
            wrong.append(f"{name}: {found.kind}: {found.text}")
    told = {
        "kernels": [kernel.name for kernel in kernels],
        "calls": len(cases),
        "wrong": wrong,
        "device": "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device),
        "torch": torch.__version__,
    }
    print(json.dumps(told), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
