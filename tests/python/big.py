"""Sizes at which 32 bits do not do: strides, lengths, masks, heads, grids.

    python tests/python/big.py --json big.json

Rows and heads that are sampled are held against float64. Takes 40 GB of a GPU's memory.
`--device cpu` drives the same with small numbers on the reference. Exits with 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor

from exactness import Ledger, expect, normal
from float8_scheme import is_native
from prefill import explain, single_prefill_with_kv_cache
from prefill.backends import MAX_LENGTH

TILE_EDGES = (0, 1, 63, 64, 127, 128, 129, 191, 192, 255, 256)


@dataclass(frozen=True)
class Sizes:
    far: int
    """Elements between the first row or head and the last one."""
    square: int
    """Query rows, and keys, of long causal attention."""
    keys: int
    masked: int
    """Rows, and keys, of a mask: its bits are the square of that."""
    heads: int
    """Head counts from 1 to this."""
    grid: int
    """Heads beyond what a grid's second dimension holds."""
    rows: int
    """Query rows of few keys."""


CUDA = Sizes((1 << 32) + (1 << 20), 131_072, 1 << 20, 65_600, 256, 70_000, 3_000_000)
CPU = Sizes(1 << 20, 300, 3000, 200, 9, 100, 1000)


@dataclass
class Setting:
    backend: str
    device: str
    sizes: Sizes
    ledger: Ledger

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        return normal(*shape, dtype=dtype, seed=seed, device=self.device)

    def inputs(
        self,
        qo_len: int,
        kv_len: int,
        heads: tuple[int, int],
        dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.normal(qo_len, heads[0], dim, dtype=dtype),
            self.normal(kv_len, heads[1], dim, dtype=dtype, seed=1),
            self.normal(kv_len, heads[1], dim, dtype=dtype, seed=2),
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = single_prefill_with_kv_cache(
            q, k, v, backend=self.backend, return_lse=True, **arguments
        )
        return out, lse

    def compare(
        self,
        label: str,
        tensors: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        seen: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        """Run the call and compare `rows` of it, which see those keys: bool [rows, kv_len]."""
        q, k, v = tensors
        out, lse = self.run(q, k, v, **arguments)
        self.ledger.none(f"{label}: not finite", ~out.isfinite() | ~lse.isfinite()[..., None])
        expected = expect(q[rows], k, v, custom_mask=seen)
        self.ledger.result(label, out[rows], lse[rows], expected)

    def sample(self, length: int) -> Tensor:
        """Rows at both ends, in the middle and anywhere."""
        ends = [*TILE_EDGES, *(length - 1 - edge for edge in TILE_EDGES), length // 2]
        generator = torch.Generator().manual_seed(length)
        anywhere = torch.randint(length, (8,), generator=generator).tolist()
        rows = sorted({row for row in (*ends, *anywhere) if 0 <= row < length})
        return torch.tensor(rows, device=self.device)


def seen_by(rows: Tensor, qo_len: int, kv_len: int, window_left: int = -1) -> Tensor:
    """What rows of causal attention see: bool [rows, kv_len]."""
    distance = torch.arange(kv_len, device=rows.device) - (rows[:, None] + kv_len - qo_len)
    seen = distance <= 0
    return seen & (distance >= -window_left) if window_left >= 0 else seen


def far_rows(s: Setting) -> None:
    """q, k, v and out share wide rows: all rows lie far apart, the last beyond 2^32 elements."""
    length, heads, dim = 1025, 2, 64
    step = -(-s.sizes.far // (length - 1)) // 8 * 8 + 8
    buffer = torch.full((length * step,), math.nan, dtype=torch.bfloat16, device=s.device)
    q, k, v, out = (
        buffer.as_strided((length, heads, dim), (step, dim, 1), n * heads * dim) for n in range(4)
    )
    assert (length - 1) * step >= s.sizes.far
    for x, values in zip((q, k, v), s.inputs(length, length, (heads, heads)), strict=True):
        x.copy_(values)
    rows = s.sample(length)
    seen = seen_by(rows, length, length)
    s.compare("rows far apart", (q, k, v), rows, seen, causal=True, out=out)
    s.ledger.none("rows far apart: out", out[rows].isnan())


def far_heads(s: Setting) -> None:
    """HND caches whose heads lie far apart, and results likewise."""
    qo_len, kv_len, heads, dim = 130, 300, 3, 64
    step = s.sizes.far // 2 // 8 * 8 + 8
    size = 2 * step + (kv_len + 8) * 2 * dim
    buffer = torch.full((size,), math.nan, dtype=torch.bfloat16, device=s.device)
    places = ((heads, kv_len, dim), (step, dim, 1))
    k, v = (buffer.as_strided(*places, n * kv_len * dim) for n in (0, 1))
    q, values_k, values_v = s.inputs(qo_len, kv_len, (heads, heads))
    k.copy_(values_k.transpose(0, 1))
    v.copy_(values_v.transpose(0, 1))
    out = torch.full((size,), math.nan, dtype=torch.bfloat16, device=s.device)
    out = out.as_strided((qo_len, heads, dim), (dim, step, 1))
    lse = torch.full((2 * step + qo_len,), math.nan, device=s.device)
    lse = lse.as_strided((qo_len, heads), (1, step))
    s.run(q, k, v, kv_layout="HND", causal=True, out=out, lse=lse)
    expected = expect(q, values_k, values_v, causal=True)
    s.ledger.result("heads far apart", out, lse, expected)


def far_masks(s: Setting) -> None:
    """A bool mask whose rows lie far apart."""
    qo_len, kv_len = 130, 200
    tensors = s.inputs(qo_len, kv_len, (4, 2))
    step = s.sizes.far // (qo_len - 1) + 1
    buffer = torch.ones(qo_len * step, dtype=torch.bool, device=s.device)
    mask = buffer[-(qo_len - 1) * step - kv_len :].as_strided((qo_len, kv_len), (step, 1))
    mask.copy_(s.normal(qo_len, kv_len) > 0)
    rows = torch.arange(qo_len, device=s.device)
    s.compare("mask rows far apart", tensors, rows, mask, custom_mask=mask)


def long_square(s: Setting) -> None:
    length = s.sizes.square
    rows = s.sample(length)
    tensors = s.inputs(length, length, (2, 1), 128)
    s.compare("long", tensors, rows, seen_by(rows, length, length), causal=True)
    window = {"causal": True, "window_left": length // 3}
    seen = seen_by(rows, length, length, length // 3)
    s.compare("long, window", tensors, rows, seen, **window)


def many_keys(s: Setting) -> None:
    qo_len, kv_len = 128, s.sizes.keys
    rows = s.sample(qo_len)
    for dtype in (torch.bfloat16, torch.float16):
        tensors = s.inputs(qo_len, kv_len, (2, 1), 128, dtype)
        seen = seen_by(rows, qo_len, kv_len)
        s.compare(f"many keys, {dtype}", tensors, rows, seen, causal=True)
        seen = seen_by(rows, qo_len, kv_len, kv_len // 2)
        window = {"causal": True, "window_left": kv_len // 2}
        s.compare(f"many keys, window, {dtype}", tensors, rows, seen, **window)


def equal_scores(s: Setting) -> None:
    """Every key counts alike: each weight is 1 over their number, and none may be lost."""
    kv_len = s.sizes.keys
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = s.inputs(3, kv_len, (2, 1), dtype=dtype)
        out, lse = s.run(q, torch.zeros_like(k), torch.ones_like(v))
        s.ledger.at_most(f"equal, {dtype}: out", (out - 1.0).abs().amax(), 2.0**-10)
        s.ledger.at_most(f"equal, {dtype}: LSE", (lse - math.log2(kv_len)).abs().amax(), 1e-3)
        out, _ = s.run(q, torch.zeros_like(k), v)
        mean = v.double().mean(0)
        # Sums of 2^20 products in float32, of weights that are exact: far below the bound.
        error = (out.double() - mean).abs().amax()
        s.ledger.at_most(f"equal, {dtype}: mean", error, 2.0**-8 * mean.abs().amax())


def one_key_as_many(s: Setting) -> None:
    """A key whose rows have stride 0: the lengths of tensors without their memory."""
    kv_len = 16 * s.sizes.keys
    q, k, v = s.inputs(2, 1, (2, 1))
    v = torch.where(v > 0.0, 1.0, -0.5).to(v.dtype)  # float32 has their sums
    out, lse = s.run(q, k.expand(kv_len, -1, -1), v.expand(kv_len, -1, -1))
    expected = expect(q, k, v)
    added = (lse - expected.lse - math.log2(kv_len)).abs().amax()
    s.ledger.at_most("one key as many: LSE", added, 1e-3)
    error = (out.double() - expected.out).abs().amax()
    s.ledger.at_most("one key as many: out", error, 2.0**-8 * v.double().abs().amax())


def large_masks(s: Setting) -> None:
    """More than 2^32 bits: packed, and bool."""
    length = s.sizes.masked
    rows = s.sample(length)
    tensors = s.inputs(length, length, (1, 1))
    generator = torch.Generator(s.device).manual_seed(1)
    size = -(-length * length // 8)
    bits = torch.randint(256, (size,), dtype=torch.uint8, device=s.device, generator=generator)
    position = rows[:, None] * length + torch.arange(length, device=s.device)
    seen = (bits[position >> 3] >> (position & 7).to(torch.uint8)) & 1 == 1
    s.compare("packed mask", tensors, rows, seen, packed_custom_mask=bits)
    del bits
    keep = torch.randint(
        2, (length, length), dtype=torch.uint8, device=s.device, generator=generator
    ).view(torch.bool)
    s.compare("bool mask", tensors, rows, keep[rows], custom_mask=keep)


def head_counts(s: Setting) -> None:
    qo_len, kv_len = 20, 70
    rows = torch.arange(qo_len, device=s.device)
    seen = seen_by(rows, qo_len, kv_len)
    for heads in range(1, s.sizes.heads + 1):
        for kv_heads in {1, heads}:
            tensors = s.inputs(qo_len, kv_len, (heads, kv_heads))
            s.compare(f"heads {heads}, {kv_heads}", tensors, rows, seen, causal=True)


def grids(s: Setting) -> None:
    """More heads, and more row tiles, than 16 bits count."""
    heads = s.sizes.grid
    bfloat16, float32, e4m3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    for kv_heads in (1, heads):
        # Those of the passes too, which widen or transpose float8 and merge float32.
        for dtype, o_dtype in ((bfloat16, bfloat16), (e4m3, float32)):
            q, k, v = s.inputs(2, 5, (heads, kv_heads), dtype=dtype)
            out, lse = s.run(q, k, v, o_dtype=o_dtype)
            native = is_native(explain(q, k, v, backend=s.backend, o_dtype=o_dtype))
            some = s.sample(heads)
            some_kv = some if kv_heads > 1 else slice(0, 1)
            few = q[:, some], k[:, some_kv], v[:, some_kv]
            expected = expect(*few, o_dtype=o_dtype, native=native)
            label = f"{kv_heads} key heads, {dtype}"
            s.ledger.result(label, out[:, some], lse[:, some], expected)
            s.ledger.none(f"{label}: not finite", ~out.isfinite())
    rows = s.sample(s.sizes.rows)
    tensors = s.inputs(s.sizes.rows, 70, (2, 1))
    s.compare("many rows", tensors, rows, torch.ones(len(rows), 70, device=s.device).bool())


def too_long(s: Setting) -> None:
    """What kernels do not count is refused before anything is launched."""
    q = s.normal(1, 1, 8)
    k = q.expand(MAX_LENGTH, 1, 8)
    told = explain(q, k, k, backend=s.backend)
    right = told.backend == "reference" if s.backend == "reference" else "2^30" in told.reason
    s.ledger.none("too long", torch.tensor([not right], device=s.device))


CASES: dict[str, Callable[[Setting], None]] = {
    case.__name__: case
    for case in (
        *(far_rows, far_heads, far_masks, long_square, many_keys, equal_scores),
        *(one_key_as_many, large_masks, head_counts, grids, too_long),
    )
}


def figures(case: Callable[[Setting], None], backend: str, device: str) -> tuple[int, str]:
    """How many figures were compared, and what was wrong."""
    setting = Setting(backend, device, CPU if device == "cpu" else CUDA, Ledger())
    try:
        case(setting)
        setting.ledger.finish()
    except (AssertionError, RuntimeError, NotImplementedError, ValueError) as error:
        return len(setting.ledger.labels), f"{type(error).__name__}: {error}"
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()
    return len(setting.ledger.labels), ""


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["fa2", "fa3", "reference"], action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="where the summary goes, beside the screen")
    args = parser.parse_args(given)
    natural = ["reference"] if args.device == "cpu" else ["fa3", "fa2"]
    summary: dict[str, Any] = {"torch": torch.__version__, "device": args.device, "cases": []}
    if args.device != "cpu":
        summary["device"] = torch.cuda.get_device_name(args.device)
    backends, cases = args.backend or natural, args.case or list(CASES)
    for backend in backends:
        for name in cases:
            start = time.monotonic()
            compared, wrong = figures(CASES[name], backend, args.device)
            seconds = round(time.monotonic() - start, 1)
            row = {"backend": backend, "case": name, "seconds": seconds, "figures": compared}
            summary["cases"].append(row | {"wrong": wrong})
            print(json.dumps(summary["cases"][-1]), flush=True)
            summary["missing"] = len(backends) * len(cases) - len(summary["cases"])
            if args.json:  # what is done is kept if the run is stopped
                args.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 1 if any(row["wrong"] for row in summary["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
