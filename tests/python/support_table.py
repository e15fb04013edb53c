"""Writes the tables of docs/backends.md: `python tests/python/support_table.py`.

No cell is typed. Each is what `explain` says of a call that uses the feature, on a device and a
full build that are not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cases import BFLOAT16, E4M3, E5M2, FLOAT16, PLAIN, make_call
from fakes import cuda, library, pretend
from float8_scheme import is_native
from prefill import backends
from prefill.explain import Explanation, explain_request
from prefill.request import make_request
from prefill.support import BuildInfo, DeviceInfo, NativeLibrary, arch_runs_on

PAGE = Path(__file__).parents[2] / "docs/backends.md"
COLUMNS = ("fa2", "fa3", "reference")
HOPPER = cuda(9, 0)
# What was run there: an H200 is all that was at hand.
DEVICES: dict[str, tuple[DeviceInfo, str]] = {
    "T4 (7.5)": (cuda(7, 5), "never"),
    "A100 (8.0)": (cuda(8, 0), "never"),
    "A10, RTX 3090 (8.6)": (cuda(8, 6), "never"),
    "L4, RTX 4090 (8.9)": (cuda(8, 9), "never"),
    "H100, H200 (9.0)": (HOPPER, "H200: all three"),
    "B200 (10.0)": (cuda(10, 0), "never"),
    "RTX 5090 (12.0)": (cuda(12, 0), "never"),
    "CPU": (DeviceInfo("cpu"), "reference"),
}


class Feature(NamedTuple):
    """A row: the arguments it is about, what of them, the `Case` that uses it, and how it is done.

    Where tensors are copied the note says why by itself.
    """

    arguments: str
    what: str
    case: dict[str, Any]
    note: str = ""


CLASS = "rides on the next class up, filled with zeros"
MASK_PASS = "one pass before the kernel sorts its tiles and lays out the bits of mixed ones"
BOUND = "a bound: tiles past it are not computed"
LOGITS = "in the kernel, where masks are applied"
KINDS = {"float": "a float", "per head": "per head", "element": "one element"}
EPILOGUE = "in the kernel's epilogue"

FEATURES = (
    *(
        Feature("q, k, v", what, {"dtypes": dtypes, "head_dims": (128, 128)})
        for what, dtypes in {
            "all float16": (FLOAT16, FLOAT16, FLOAT16),
            "all bfloat16": (BFLOAT16, BFLOAT16, BFLOAT16),
            "float16 q, float8_e4m3fn k and v": (FLOAT16, E4M3, E4M3),
            "float16 q, float8_e5m2 k and v": (FLOAT16, E5M2, E5M2),
            "bfloat16 q, float8_e4m3fn k and v": (BFLOAT16, E4M3, E4M3),
            "bfloat16 q, float8_e5m2 k and v": (BFLOAT16, E5M2, E5M2),
            "all float8_e4m3fn": (E4M3, E4M3, E4M3),
            "all float8_e5m2": (E5M2, E5M2, E5M2),
            "float8_e4m3fn q and k, float8_e5m2 v": (E4M3, E4M3, E5M2),
        }.items()
    ),
    Feature(
        "q, k, v", "all float8_e4m3fn, head dims 72", {"dtypes": (E4M3,) * 3, "head_dims": (72, 72)}
    ),
    Feature(
        "q, k, v",
        "all float8_e4m3fn, head dims 64",
        {"dtypes": (E4M3,) * 3, "head_dims": (64, 64)},
    ),
    *(
        Feature("q, k, v", f"head dims {qk} and {vo}", {"head_dims": (qk, vo)}, note)
        for qk, vo, note in (
            (64, 64, ""),
            (128, 128, ""),
            (192, 128, ""),
            (256, 256, ""),
            (72, 72, CLASS),
            (96, 64, CLASS),
            (8, 256, CLASS),
        )
    ),
    Feature("q, k, v", "as many query heads as key heads", {"group": 1}),
    Feature("q, k, v", "3 query heads a key head", {"group": 3}),
    *(
        Feature("q, k, v", what, {"view": view})
        for what, view in {
            "heads before rows in memory": "heads first",
            "views of a fused projection": "fused",
            "slices of a cache": "in a cache of heads first",
            "strides no multiple of 8 elements": "odd strides",
            "address no multiple of 16 bytes": "odd address",
            "last dimension not dense": "last dim apart",
        }.items()
    ),
    Feature("q, k, v", "no keys", {"kv_len": 0}, "nothing is launched"),
    Feature("q, k, v", "no rows", {"qo_len": 0}, "nothing is launched"),
    *(
        Feature(f"scale_{x}", KINDS[kind], {f"scale_{x}": kind}, how)
        for x in "qkv"
        for kind, how in {
            "float": EPILOGUE if x == "v" else "part of sm_scale",
            "per head": EPILOGUE if x == "v" else "in the kernel",
            "element": EPILOGUE if x == "v" else "in the kernel",
        }.items()
    ),
    *(
        Feature(f"{x}_scale", KINDS[kind], {f"{x}_scale": kind}, how)
        for x in "kv"
        for kind, how in {
            "float": EPILOGUE if x == "v" else "part of sm_scale",
            "element": f"times scale_{x}, on the device",
        }.items()
    ),
    Feature("o_dtype", "that of q", {"o_dtype": "same"}),
    Feature("o_dtype", "the other one of 16 bits", {"o_dtype": "other 16 bits"}),
    Feature("o_dtype", "float32", {"o_dtype": "float32"}),
    Feature(
        "o_dtype",
        "float32 of all float8",
        {"dtypes": (E4M3,) * 3, "head_dims": (128, 128), "o_dtype": "float32"},
    ),
    Feature("custom_mask", "dense", {"mask": "bool"}, MASK_PASS),
    Feature("custom_mask", "rows apart", {"mask": "bool, rows apart"}, MASK_PASS),
    Feature("custom_mask", "columns apart", {"mask": "bool, columns apart"}, MASK_PASS),
    Feature("packed_custom_mask", "at any address", {"mask": "packed, odd address"}, MASK_PASS),
    Feature("packed_custom_mask", "bytes apart", {"mask": "packed, bytes apart"}, MASK_PASS),
    Feature("causal", "", {"mask": "causal"}, BOUND),
    Feature("causal", "more rows than keys", {"mask": "causal", "kv_len": 5}, BOUND),
    Feature("kv_layout", '"HND"', {"kv_layout": "HND"}, "strides alone"),
    Feature("pos_encoding_mode", '"ALIBI"', {"position": "ALiBi"}, LOGITS),
    Feature("alibi_slopes", 'with "ALIBI"', {"position": "ALiBi, slopes"}, LOGITS),
    Feature("pos_encoding_mode", '"ROPE_LLAMA"', {"position": "RoPE"}),
    Feature(
        "pos_encoding_mode",
        '"ROPE_LLAMA" of all float8',
        {"dtypes": (E4M3,) * 3, "position": "RoPE"},
    ),
    Feature("rope_scale, rope_theta", 'with "ROPE_LLAMA"', {"position": "RoPE, scaled"}),
    Feature(
        "use_fp16_qk_reduction",
        "float16 q and k",
        {"fp16_reduction": True},
        "accumulated in float32: more exact",
    ),
    Feature("sm_scale", "negative", {"sm_scale": -0.2}),
    Feature("sm_scale", "0", {"sm_scale": 0.0}),
    Feature("window_left", "alone", {"window_left": 7}, BOUND),
    Feature("window_left", "with causal", {"window_left": 7, "mask": "causal"}, BOUND),
    Feature("window_left", "with a mask", {"window_left": 7, "mask": "bool"}, MASK_PASS),
    Feature("logits_soft_cap", "", {"soft_cap": 30.0}, LOGITS),
    Feature("sinks", "", {"sinks": True}, EPILOGUE),
    Feature("return_lse", "", {"lse": "new"}, EPILOGUE),
    Feature("lse_base", '"e"', {"lse": "new", "lse_base": "e"}, EPILOGUE),
    Feature("out", "rows apart", {"out": "wide"}),
    Feature("out", "strides no multiple of 8 elements", {"out": "odd strides"}),
    Feature("lse", "any strides", {"lse": "transposed"}),
    Feature(
        "together",
        "mask, window, cap, slopes, sinks, scales, HND",
        {
            "mask": "packed",
            "window_left": 7,
            "soft_cap": 30.0,
            "position": "ALiBi, slopes",
            "sinks": True,
            "scale_q": "per head",
            "kv_layout": "HND",
        },
        MASK_PASS,
    ),
)


def explained(
    case: dict[str, Any], backend: str, device: DeviceInfo, native: NativeLibrary
) -> Explanation:
    """What `explain` would say on that device, of that build."""
    call = make_call(replace(PLAIN, **case), "cpu")
    request = make_request(*call.tensors, backend=backend, **call.arguments)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, device, native)
        return explain_request(request)


def cell(explanation: Explanation, backend: str) -> str:
    if explanation.backend is None:
        return f"no: {'; '.join(explanation.rejected[backend])}"
    copied = ", ".join(copy.partition(":")[0] for copy in explanation.copies)
    in_float8 = ", in float8" if is_native(explanation) else ""
    return f"yes, copies {copied}" if copied else f"yes{in_float8}"


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(headers), *(tuple(row) for row in rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def support_table(native: NativeLibrary) -> str:
    rows = []
    for feature in FEATURES:
        answers = {name: explained(feature.case, name, HOPPER, native) for name in COLUMNS}
        reasons: dict[str, None] = {}
        for name, each in answers.items():
            for made in (*each.copies, *each.passes):
                tensor, _, reason = made.partition(": ")
                if is_native(each) and reason not in reasons:  # not what another one does
                    reason = f"{name}: {tensor} {reason}"
                reasons[reason] = None
        note = "; ".join([*reasons, *([feature.note] if feature.note else [])])
        cells = (cell(answer, name) for name, answer in answers.items())
        rows.append((feature.arguments, feature.what, *cells, note))
    return table(("argument", "what of it", *COLUMNS, "how"), rows)


def device_table(native: NativeLibrary) -> str:
    assert native.build is not None
    rows = []
    for name, (device, run) in DEVICES.items():
        auto = explained({}, "auto", device, native).backend
        codes = (code(native.build, backend, device) for backend in COLUMNS[:2])
        rows.append((name, str(auto), *codes, run))
    return table(("device", '"auto" takes', "fa2 is", "fa3 is", "run there"), rows)


def code(build: BuildInfo, backend: str, device: DeviceInfo) -> str:
    """The first arch of the build that serves the device."""
    for arch in build.archs[backend]:
        number, _, kind = arch.partition("-")
        if device.type == "cuda" and arch_runs_on(arch, device.capability):
            return f"sm_{number}" if kind == "real" else f"PTX of sm_{number}"
    return "-"


def auto_table() -> str:
    """The rule as backends.py has it."""
    lines = (backends.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def tables(native: NativeLibrary) -> dict[str, str]:
    return {
        "auto": auto_table(),
        "devices": device_table(native),
        "support": support_table(native),
    }


def marked(name: str) -> re.Pattern[str]:
    """The part of a page that a table of that name stands in."""
    return re.compile(rf"(?<=<!-- {name}: begin -->\n)(.*?)(?=<!-- {name}: end -->)", re.DOTALL)


def main() -> None:
    page = PAGE.read_text()
    for name, text in tables(library()).items():
        match = marked(name).search(page)
        assert match is not None, name
        page = f"{page[: match.start()]}{text}\n{page[match.end() :]}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
