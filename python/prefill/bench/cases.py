"""What is measured: named grids of calls. A new one is one entry of `GRIDS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from prefill.bench import masks
from prefill.packing import packbits
from prefill.request import FP8_DTYPES
from prefill.support import dtype_name

Unit = Literal["TFLOP/s", "us"]


class Heads(NamedTuple):
    """Query and key heads, head dims of QK and of V."""

    qo: int
    kv: int
    dim_qk: int
    dim_vo: int


class Length(NamedTuple):
    """Query rows and keys."""

    qo: int
    kv: int


@dataclass(frozen=True)
class Variant:
    """Arguments of the public function beside q, k, v and out.

    A value may be a function `(case, device) -> Tensor`, which makes a mask or scales when the
    inputs are made. `pairs` counts the visible pairs of (qo_len, kv_len) where `causal` and
    `window_left` do not say it, as with a custom mask. `baseline` names the plain variant of the
    same grid whose speed this one's is compared with, contender by contender. `float8` are those of
    "qkv" that are float8_e4m3fn instead of the grid's dtype.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    pairs: Callable[[int, int], float] | None = None
    baseline: str = ""
    float8: str = ""


FULL_AND_CAUSAL: Mapping[str, Variant] = {"full": Variant(), "causal": Variant({"causal": True})}


def feature(**arguments: Any) -> Variant:
    """A causal call with these arguments, beside the plain one."""
    return Variant({"causal": True, **arguments}, baseline="causal")


def masked(mask: masks.Mask, baseline: str, *, packed: bool = True) -> Variant:
    """A call with a custom mask, given as bits or as bool."""

    def make(case: Case, device: torch.device) -> Tensor:
        made = mask.make(*case.length, device)
        return packbits(made, bitorder="little") if packed else made

    name = "packed_custom_mask" if packed else "custom_mask"
    return Variant({name: make}, mask.pairs, baseline)


def random_sinks(case: Case, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(case.heads.qo, generator=generator, device=device)


def query_scales(case: Case, device: torch.device) -> Tensor:
    return torch.linspace(0.8, 1.25, case.heads.qo, device=device)


def key_scales(case: Case, device: torch.device) -> Tensor:
    return torch.linspace(0.8, 1.25, case.heads.kv, device=device)


def quantised(float8: str, baseline: str, **arguments: Any) -> Variant:
    """A call with some of q, k and v in float8 and a multiplier for each head of them."""
    makers = {"q": query_scales, "k": key_scales, "v": key_scales}
    scales = {f"scale_{name}": makers[name] for name in float8}
    return Variant({**arguments, **scales}, baseline=baseline, float8=float8)


def quantised_whole(baseline: str, **arguments: Any) -> Variant:
    """A call with q, k and v in float8 and one multiplier for each of them, whatever the head."""
    scales = {"scale_q": 1.5, "scale_k": 0.75, "scale_v": 1.6}
    return Variant({**arguments, **scales}, baseline=baseline, float8="qkv")


@dataclass(frozen=True)
class Grid:
    """The product of heads, variants and lengths.

    `unit` is what its table shows; `names_heads` where names without their heads would be the same.
    """

    heads: tuple[Heads, ...]
    lengths: tuple[Length, ...]
    variants: Mapping[str, Variant] = field(default_factory=lambda: FULL_AND_CAUSAL)
    dtype: torch.dtype = torch.bfloat16
    unit: Unit = "TFLOP/s"
    names_heads: bool = False


def square(*lengths: int) -> tuple[Length, ...]:
    return tuple(Length(length, length) for length in lengths)


D128 = Heads(32, 8, 128, 128)
D64 = Heads(32, 8, 64, 64)
D256 = Heads(16, 4, 256, 256)
D192 = Heads(32, 32, 192, 128)
SOFT_CAP = feature(logits_soft_cap=30.0)
ALIBI = feature(pos_encoding_mode="ALIBI")
ROPE = feature(pos_encoding_mode="ROPE_LLAMA")
WINDOW = feature(window_left=1023)
FLOAT8: Mapping[str, Variant] = {
    **FULL_AND_CAUSAL,
    "full float8": quantised("qkv", "full"),
    "causal float8": quantised("qkv", "causal", causal=True),
    "full float8 by tensor": quantised_whole("full"),
    "causal float8 by tensor": quantised_whole("causal", causal=True),
}
FLOAT8_KV: Mapping[str, Variant] = {
    "full float8 kv": quantised("kv", "full"),
    "causal float8 kv": quantised("kv", "causal", causal=True),
}

GRIDS: dict[str, tuple[Grid, ...]] = {
    "core": (
        Grid(
            heads=(D128,),
            lengths=square(512, 1024, 2048, 4096, 8192, 16384, 32768),
        ),
    ),
    "dims": (
        Grid(
            heads=(D64, D256, D192),
            lengths=square(2048, 8192, 16384),
        ),
    ),
    "append": (
        Grid(
            heads=(Heads(32, 4, 128, 128),),
            lengths=tuple(
                Length(q, 1024 * kv) for q in (1, 16, 128, 512, 2048) for kv in (4, 32, 128)
            ),
            variants={"causal": Variant({"causal": True})},
            unit="us",
        ),
        Grid(
            heads=(D128,),
            lengths=(Length(64, 8192),),
            variants={"full": Variant(), "mask tree": masked(masks.TREE, "full")},
            unit="us",
        ),
    ),
    "features": (
        Grid(
            heads=(D128,),
            lengths=square(16384),
            variants={
                **FULL_AND_CAUSAL,
                "soft cap": SOFT_CAP,
                "ALiBi": ALIBI,
                "RoPE": ROPE,
                "sinks": feature(sinks=random_sinks),
                "window 1023": WINDOW,
                "window 4095": feature(window_left=4095),
                "soft cap, window 1023": feature(logits_soft_cap=30.0, window_left=1023),
                "soft cap, ALiBi": feature(logits_soft_cap=30.0, pos_encoding_mode="ALIBI"),
                "mask tril": masked(masks.TRIL, "causal"),
                "mask tril, bool": masked(masks.TRIL, "causal", packed=False),
                "mask padding": masked(masks.PADDING, "full"),
                "mask 8 blocks": masked(masks.BLOCK_DIAGONAL, "full"),
                "mask random": masked(masks.RANDOM, "full"),
            },
        ),
        Grid(
            heads=(D128,),
            lengths=square(4096),
            variants={
                "causal": Variant({"causal": True}),
                "soft cap": SOFT_CAP,
                "ALiBi": ALIBI,
                "RoPE": ROPE,
            },
        ),
        Grid(  # with a window, more keys must not take more time
            heads=(D128,),
            lengths=(Length(4096, 16384), Length(4096, 32768)),
            variants={"causal": Variant({"causal": True}), "window 1023": WINDOW},
        ),
        Grid(
            heads=(D64,),
            lengths=square(16384),
            variants={
                "causal": Variant({"causal": True}),
                "soft cap": SOFT_CAP,
                "ALiBi": ALIBI,
                "window 1023": WINDOW,
                "mask tril": masked(masks.TRIL, "causal"),
            },
        ),
    ),
    "balance": (  # row tiles that do not fill the SMs evenly
        Grid(
            heads=(Heads(28, 4, 128, 128), Heads(40, 8, 128, 128)),
            lengths=square(512, 1024, 2048, 4096),
            names_heads=True,
        ),
        Grid(
            heads=tuple(Heads(heads, heads, 128, 128) for heads in (1, 2, 4)),
            lengths=square(8192),
            names_heads=True,
        ),
    ),
    "fp8": (  # beside this package's own bfloat16
        Grid(heads=(D128,), lengths=square(2048, 8192, 16384), variants={**FLOAT8, **FLOAT8_KV}),
        Grid(heads=(D64, D256, D192), lengths=square(8192), variants=FLOAT8),
    ),
}


@dataclass(frozen=True)
class Inputs:
    """One independent set of tensors of a case, and the arguments, which all its sets share."""

    q: Tensor
    k: Tensor
    v: Tensor
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of a grid."""

    heads: Heads
    length: Length
    variant_name: str
    variant: Variant
    dtype: torch.dtype
    unit: Unit = "TFLOP/s"
    names_heads: bool = False

    @property
    def name(self) -> str:
        return self._named(self.variant_name)

    @property
    def baseline(self) -> str | None:
        """Name of the plain case that this one is compared with."""
        return self._named(self.variant.baseline) if self.variant.baseline else None

    def _named(self, variant_name: str) -> str:
        dims = f"d{self.heads.dim_qk}"
        if self.heads.dim_vo != self.heads.dim_qk:
            dims += f"/{self.heads.dim_vo}"
        length = length_text(self.length.kv)
        if self.length.qo != self.length.kv:
            length = f"q{length_text(self.length.qo)} kv{length}"
        kind = "" if self.dtype == torch.bfloat16 else f"{dtype_name(self.dtype)} "
        heads = f"{self.heads.qo}/{self.heads.kv} heads " if self.names_heads else ""
        return f"{kind}{heads}{dims} {length} {variant_name}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of q, k and v."""
        float8 = self.variant.float8
        return tuple(torch.float8_e4m3fn if name in float8 else self.dtype for name in "qkv")

    @property
    def o_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtypes[0] in FP8_DTYPES else self.dtype

    @property
    def pairs(self) -> float:
        """Visible pairs of row and key, as an area: causal over a square is half of it."""
        if self.variant.pairs is not None:
            return self.variant.pairs(*self.length)
        arguments = self.variant.arguments
        return masks.visible_pairs(
            *self.length, arguments.get("causal", False), arguments.get("window_left", -1)
        )

    @property
    def flop(self) -> float:
        """Multiplications and additions of both products over the visible pairs."""
        return 2.0 * self.pairs * self.heads.qo * (self.heads.dim_qk + self.heads.dim_vo)

    @property
    def input_bytes(self) -> int:
        (qo, kv), heads = self.length, self.heads
        elements = (
            qo * heads.qo * heads.dim_qk,
            kv * heads.kv * heads.dim_qk,
            kv * heads.kv * heads.dim_vo,
        )
        return sum(n * dtype.itemsize for n, dtype in zip(elements, self.dtypes, strict=True))

    @property
    def output_shape(self) -> tuple[int, int, int]:
        return self.length.qo, self.heads.qo, self.heads.dim_vo

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """The variant's arguments, tensors made."""
        made = dict(self.variant.arguments)
        for name, value in made.items():
            if callable(value):
                make: Callable[[Case, torch.device], Tensor] = value
                made[name] = make(self, device)
        return made

    def inputs(self, device: torch.device, arguments: Mapping[str, Any], seed: int) -> Inputs:
        """Random normal inputs: zeros would draw less power and run faster."""
        generator = torch.Generator(device).manual_seed(seed)
        heads, (q_dtype, k_dtype, v_dtype) = self.heads, self.dtypes

        def normal(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        return Inputs(
            normal(q_dtype, self.length.qo, heads.qo, heads.dim_qk),
            normal(k_dtype, self.length.kv, heads.kv, heads.dim_qk),
            normal(v_dtype, self.length.kv, heads.kv, heads.dim_vo),
            arguments,
        )

    def describe(self) -> dict[str, Any]:
        """For the JSON."""
        arguments = {
            name: "a tensor" if callable(value) else value
            for name, value in self.variant.arguments.items()
        }
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "float8": self.variant.float8,
            "qo_len": self.length.qo,
            "kv_len": self.length.kv,
            "num_qo_heads": self.heads.qo,
            "num_kv_heads": self.heads.kv,
            "head_dim_qk": self.heads.dim_qk,
            "head_dim_vo": self.heads.dim_vo,
            "variant": self.variant_name,
            "arguments": arguments,
            "baseline": self.baseline,
            "flop": self.flop,
            "unit": self.unit,
        }


def expand(grids: Sequence[Grid], dtype: torch.dtype | None = None) -> list[Case]:
    """All cases of the grids, in a grid's dtype or another."""
    return [
        Case(heads, length, name, variant, dtype or grid.dtype, grid.unit, grid.names_heads)
        for grid in grids
        for heads in grid.heads
        for name, variant in grid.variants.items()
        for length in grid.lengths
    ]


def select(cases: Sequence[Case], lengths: Sequence[int], match: str) -> list[Case]:
    """Those of the lengths, if any are given, whose name holds `match`, and their baselines."""
    chosen = {
        case.name: case.baseline
        for case in cases
        if (not lengths or case.length.kv in lengths) and match.lower() in case.name.lower()
    }
    return [case for case in cases if case.name in chosen or case.name in chosen.values()]


def length_text(length: int) -> str:
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def parse_lengths(text: str) -> list[int]:
    """Read "512,1k 32k"; ValueError where a word is no length."""
    lengths = []
    for word in text.replace(",", " ").split():
        number, factor = (word[:-1], 1024) if word[-1] in "kK" else (word, 1)
        if not number.isdecimal() or int(number) == 0:
            raise ValueError(f"{word!r} is not a length such as 512 or 4k")
        lengths.append(int(number) * factor)
    if not lengths:
        raise ValueError("no length is given")
    return lengths
