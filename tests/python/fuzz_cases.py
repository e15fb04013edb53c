"""Cases over the whole space of arguments, from a seed; a case prints as the Python that makes it.

Beside what `cases.Case` chooses, a fuzzed case names its backend, may force a number of parts, may
have edge values as inputs, one NaN or infinity somewhere, tensors that each lie elsewhere, or an
argument that makes no sense. `fuzz_check` says what must hold of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from cases import PLAIN, VALUES, Case
from combinations import Draw
from garbage import ARGUMENTS, WORDS
from layouts import COPIED, IN_PLACE

BACKENDS = ("fa2", "fa3", "auto", "reference")
LAYOUTS = ("dense", *IN_PLACE, *COPIED)
EDGES = (0, 1, 2, 15, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
NUMBERS = ("normal", "exact", "large", "far below", "equal", "subnormal", "zero")
STRAYS = ("nan", "inf", "-inf")
EXACT = ("exact", "equal", "zero")
"""Numbers of which float32 has q . k exactly."""
HUGE, TOO_HUGE_FOR_ALIBI = 1e4, 1e10
"""Scales from which numbers must be `EXACT`, and from which there is no ALiBi."""


@dataclass(frozen=True, repr=False)
class FuzzCase(Case):
    """A call; `repr` names what differs from `PLAIN`."""

    backend: str = "auto"
    num_splits: int = 0
    """Parts of the keys; 0 leaves that to the rule."""
    layouts: tuple[str, str, str] = ("dense", "dense", "dense")
    """Where q, k and v lie, in place of `view`."""
    numbers: str = "normal"
    """What q and k hold, of `NUMBERS`. Factors that are huge go with those of which float32 has
    q . k exactly, whatever the order of the sum: no rounding is made visible by them.
    """
    stray: tuple[str, str, float] | None = None
    """One element that is not finite: of which tensor, what, and how far into it."""
    broken: tuple[str, str] | None = None
    """An argument and the word of the garbage in its place."""

    def __repr__(self) -> str:
        changed = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(PLAINEST, f.name)
        )
        return f"fuzzed({', '.join(changed)})"


def fuzzed(**choices: Any) -> FuzzCase:
    """The plainest case, but for these choices."""
    plain = {f.name: getattr(PLAIN, f.name) for f in fields(PLAIN)}
    return FuzzCase(**(plain | choices))


PLAINEST = fuzzed()


def length(draw: Draw, longest: int) -> int:
    """Often an edge of tiles or next to one, seldom above 600."""
    kind = draw.integer(0, 9)
    if kind < 4:
        return min(draw.choice(EDGES), longest)
    if kind < 6:
        return min(longest, 64 * draw.integer(1, 9) + draw.integer(-1, 1))
    return draw.integer(1, min(longest, 300) if kind < 9 else longest)


def fuzz_case(
    draw: Draw,
    backends: tuple[str, ...] = BACKENDS,
    longest: int = 5000,
    scores: int = 3_000_000,
) -> FuzzCase:
    """Any call: lengths up to `longest`, and at most so many scores in all heads together."""
    words: dict[str, Any] = {name: draw.choice(values) for name, values in VALUES.items()}
    dims = (8 * draw.integer(1, 32), 8 * draw.integer(1, 32))
    group = draw.choice((1, 1, 2, 3, 4, 5, 7, 8, 16, draw.integer(1, 70)))
    kv_heads = draw.integer(1, 3 if group < 16 else 1)
    qo_len, kv_len = length(draw, longest), length(draw, longest)
    while qo_len * kv_len * group * kv_heads > scores:
        qo_len, kv_len = (qo_len // 2, kv_len) if qo_len > kv_len else (qo_len, kv_len // 2)
    words |= {
        "view": "dense",  # `layouts` takes its place
        "head_dims": draw.choice((words["head_dims"], dims)),
        "group": group,
        "qo_len": qo_len,
        "kv_len": kv_len,
        "window_left": draw.choice((-1, -1, draw.integer(0, longest), words["window_left"], 2**40)),
        "soft_cap": draw.choice((None, words["soft_cap"], draw.number(0.01, 100.0), -1.0)),
        "sm_scale": draw.choice((None, None, words["sm_scale"], draw.number(-3.0, 3.0))),
        "sinks": draw.integer(0, 3) == 0,
        "o_dtype": draw.choice(("default", "same", words["o_dtype"])),
        "nan_key": kv_len > 0 and draw.integer(0, 7) == 0,
        "fp16_reduction": words["dtypes"] == PLAIN.dtypes and words["fp16_reduction"],
    }
    if words["mask"] == "packed, odd address" and not qo_len * kv_len:
        words["mask"] = "packed"
    case = FuzzCase(
        **words,
        kv_heads=kv_heads,
        mask_share=draw.choice((0.0, 1.0, 0.5, draw.number(0.0, 1.0))),
        backend=draw.choice(backends),
        num_splits=draw.choice((0, 0, 0, 1, 2, 3, 8, draw.integer(1, 256))),
        layouts=_layouts(draw),
        numbers=draw.choice(("normal",) * 6 + NUMBERS),
    )
    if rotates(case) and case.numbers in ("large", "far below"):
        case = replace(case, numbers="exact")
    return _with_edges(draw, case)


def rotates(case: Case) -> bool:
    """Rotated values are rounded: float32 has no product of them exactly."""
    return case.position.startswith("RoPE")


def can_be_judged(case: FuzzCase) -> bool:
    """Whether the truth at the case's scale is more than the rounding of float32.

    Factors that are huge make every rounding of q . k visible. From `TOO_HUGE_FOR_ALIBI` on a bias
    is less than half an ulp of a logit, yet kernels add it before they round: where a product lies
    in the middle of two floats, its sign decides, and equal scores part as their biases do. float64
    has less than the bias too, so that neither is the truth.
    """
    scale = abs(case.sm_scale or 0.0)
    if case.position.startswith("ALiBi") and scale >= TOO_HUGE_FOR_ALIBI:
        return False
    return scale < HUGE or (case.numbers in EXACT and not rotates(case))


def _layouts(draw: Draw) -> tuple[str, str, str]:
    """Half of the cases lie in one way."""
    one = draw.choice(LAYOUTS)
    if draw.integer(0, 1):
        return one, one, one
    return one, draw.choice(LAYOUTS), draw.choice(LAYOUTS)


def _with_edges(draw: Draw, case: FuzzCase) -> FuzzCase:
    """Perhaps a scale that is huge or tiny, a stray, or garbage."""
    kind = draw.integer(0, 19)
    if kind == 0 and not rotates(case):
        scale = draw.choice((1e4, -1e4, 6e4, 1e30, -1e30, 1e-30, -1e-30, 1e-45))
        case = replace(case, sm_scale=scale, numbers=draw.choice(EXACT))
        return case if can_be_judged(case) else replace(case, position="none")
    if kind < 3 and case.qo_len and case.kv_len:
        tensor = draw.choice(("q", "k", "v"))
        # A rotated infinity is two of them, and what its rounding moves is no number.
        value = draw.choice(("nan",) if rotates(case) and tensor != "v" else STRAYS)
        return replace(case, stray=(tensor, value, draw.number(0.0, 0.999)), nan_key=False)
    if kind == 3:
        return replace(case, broken=(draw.choice(ARGUMENTS), draw.choice(WORDS)))
    return case


def simpler(case: FuzzCase) -> Iterator[FuzzCase]:
    """Cases that are a step plainer or smaller, the largest steps first.

    Of a case that can be judged, those that can: others may fail for no fault.
    """
    could = can_be_judged(case)
    return (step for step in _steps(case) if can_be_judged(step) or not could)


def _steps(case: FuzzCase) -> Iterator[FuzzCase]:
    sizes = ("qo_len", "kv_len", "group", "kv_heads", "num_splits")
    for f in fields(case):
        plain = getattr(PLAINEST, f.name)
        if f.name not in sizes and getattr(case, f.name) != plain:
            yield replace(case, **{f.name: plain})
    for number in range(3):
        if case.layouts[number] != "dense":
            layouts = tuple("dense" if n == number else x for n, x in enumerate(case.layouts))
            yield replace(case, layouts=layouts)
    for name in sizes:
        size, least = getattr(case, name), 0 if name == "num_splits" else 1
        for smaller in (least, size // 2, size - 1):
            if least <= smaller < size:
                yield replace(case, **{name: smaller})
