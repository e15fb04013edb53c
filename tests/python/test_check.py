"""`python -m prefill check`: a self-test that passes here, and would say what is wrong."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import expect
from fakes import FLOAT8, StubKernel, cuda, library, pretend
from float32_kernel import Float32Kernel
from naive import naive_attention
from prefill import check, kernel_dtype, reference, support
from prefill.__main__ import main
from prefill.backends import NativeBackend
from prefill.plain import plain_attention
from prefill.rope import alibi_slopes, rope_angles

CPU = torch.device("cpu")
SMALL = (22, 47)
ARGUMENTS = tuple(inspect.signature(StubKernel.__call__).parameters)[1:]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "KERNEL_LENGTHS", SMALL)
    monkeypatch.setattr(check, "REFERENCE_LENGTHS", SMALL)
    monkeypatch.setattr(check, "REFERENCE_HEAD_DIMS", ((24, 16),))


def test_on_the_cpu_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefill", "check", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "checking on cpu"
    assert len([line for line in lines if line.startswith("reference ") and ": ok (" in line]) == 4
    assert "fa3 NOT CHECKED: it needs a CUDA device, and this is the cpu" in lines
    assert "fa2 NOT CHECKED: it needs a CUDA device, and this is the cpu" in lines
    assert lines[-1] == "all that was checked is right; not checked: fa3, fa2"


@pytest.mark.usefixtures("_small")
def test_kernels_that_are_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = pretend(monkeypatch, native=library(classes=((64, 64),)))
    assert main(["check", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for backend in ("fa2", "fa3"):
        for group in ("float16 64x64", "bfloat16 64x64"):
            assert any(line.startswith(f"{backend} {group}: ok (17 calls") for line in lines)
    assert lines[-1] == "all that was checked is right"
    assert {call["backend"] for call in kernel.calls} == {"fa2", "fa3"}


def tensor_cores(_: StubKernel, *args: Any) -> None:
    """What kernels compute: 16-bit weights, float32 sums, rotations in float32."""
    given = dict(zip(ARGUMENTS, args, strict=True))
    q, k, v, out, lse = (given[name] for name in ("q", "k", "v", "out", "lse"))
    dtype = kernel_dtype.widened(q.dtype, out.dtype)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    (rows, heads, _), keys = q.shape, k.shape[0]
    if given["rope"]:
        q, k = rotated(q, keys - rows), rotated(k, 0)
    group = heads // k.shape[1]
    scale = torch.full((heads, 1, 1), given["sm_scale"])
    for factor, repeat in ((given["scale_q"], 1), (given["scale_k"], group)):
        if factor is not None:
            scale = scale * factor.repeat_interleave(repeat)[:, None, None]
    q, k, v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    logits = torch.einsum("ihd,jhd->hij", q, k) * scale
    if given["soft_cap"]:
        logits = given["soft_cap"] * torch.tanh(logits / given["soft_cap"])
    distance = torch.arange(keys) - torch.arange(keys - rows, keys)[:, None]
    if given["alibi"]:
        logits = logits + alibi_slopes(heads)[:, None, None] * distance
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if given["mask"] is not None:
        mask = given["mask"]
        if mask.dtype == torch.uint8:
            bit = torch.arange(rows * keys)
            mask = (mask[bit // 8] >> (bit % 8) & 1).bool().view(rows, keys)
        seen &= mask
    if given["window_left"] >= 0:
        seen &= distance >= -given["window_left"]
    if given["window_right"] >= 0:
        seen &= distance <= given["window_right"]
    logits = logits.masked_fill(~seen, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak.isinf(), 0.0, peak)
    weights = torch.exp(logits - peak)
    total = weights.sum(-1, keepdim=True)
    if given["sinks"] is not None:
        total = total + torch.exp(given["sinks"][:, None, None] - peak)
    sums = torch.einsum("hij,jhd->ihd", weights.to(dtype).float(), v)
    if given["scale_v"] is not None:
        sums = sums * given["scale_v"].repeat_interleave(group)[:, None]
    empty = (total == 0).transpose(0, 1)
    out.copy_(torch.where(empty, 0.0, sums / total.transpose(0, 1)))
    lse.copy_(((peak + total.log()) / math.log(2.0))[..., 0].t())


def rotated(x: Tensor, first: int) -> Tensor:
    angle = rope_angles(torch.arange(first, first + len(x)), x.shape[-1], 1.0, 1e4)
    cos, sin = (f(angle).float()[:, None] for f in (torch.cos, torch.sin))
    one, other = x.float().chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(x.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_honest_16_bit_arithmetic_passes(
    dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And comes near what is allowed: the bound is no wider than it must be."""
    native = library(archs={"fa2": ["80-real"]}, classes=((128, 128),), dtypes=(dtype,))
    kernel = pretend(monkeypatch, cuda(8, 0), native)
    monkeypatch.setattr(type(kernel), "__call__", tensor_cores)
    monkeypatch.setattr(check, "REFERENCE_HEAD_DIMS", ())
    assert check.run("cpu") == 0
    told = re.search(r"ok \(17 calls, largest error ([\d.]+) of", capsys.readouterr().out)
    assert told is not None
    assert 0.4 < float(told[1]) < 1.0


def drop(*names: str) -> Any:
    return lambda arguments: arguments | dict.fromkeys(names)


WRONG = {
    "causal": (lambda given: given | {"window_right": -1}, "causal"),
    "one key too many": (
        lambda given: given | {"window_left": given["window_left"] + 1},
        "window",
    ),
    "soft cap": (lambda given: given | {"soft_cap": 0.0}, "soft cap"),
    "ALiBi": (lambda given: given | {"alibi": False}, "ALiBi"),
    "RoPE": (lambda given: given | {"rope": False}, "RoPE"),
    "mask": (drop("mask"), "bool mask"),
    "sinks": (drop("sinks"), "sinks"),
    "scales": (drop("scale_k"), "scales per head"),
    "scale of v": (drop("scale_v"), "scales per head"),
    "LSE": (lambda given: given | {"lse_scale": given["lse_scale"] * 1.01}, "full"),
}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("fault", WRONG)
def test_kernels_that_are_wrong(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change, call = WRONG[fault]
    kernel = pretend(monkeypatch, native=library(classes=((64, 64),), dtypes=("float16",)))
    right = type(kernel).__call__

    def wrong(self: Any, *args: Any) -> None:
        right(self, **change(dict(zip(ARGUMENTS, args, strict=True))))

    monkeypatch.setattr(type(kernel), "__call__", wrong)
    assert check.run("cpu") == 1
    text = capsys.readouterr().out
    assert "fa2 float16 64x64: WRONG (" in text
    assert f"  wrong: {call}: " in text
    assert text.endswith("SOMETHING IS WRONG: see above\n")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("spoil", "calls"),
    [
        (lambda out, number: out.fill_(torch.nan), 15),
        (lambda out, number: out.mul_(1 + 2.0**-8), 15),
        (lambda out, number: out[0, 0].add_(0.01 * number), 15),
    ],
    ids=["NaN", "off by a unit", "another result each time"],
)
def test_spoilt_results(
    spoil: Any, calls: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = pretend(
        monkeypatch,
        native=library(archs={"fa2": ["80-real"]}, classes=((64, 64),)),
        device=cuda(8, 0),
    )
    right, number = type(kernel).__call__, iter(range(10**6))

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        spoil(args[4], next(number))

    monkeypatch.setattr(type(kernel), "__call__", wrong)
    assert check.run("cpu") == 1
    text = capsys.readouterr().out
    assert text.count("  wrong: ") >= calls
    assert "fa3 NOT CHECKED: fa3 is not in this build, which has fa2" in text


@pytest.mark.usefixtures("_small")
def test_a_reference_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = reference.range_mask
    monkeypatch.setattr(
        reference, "range_mask", lambda rows, keys, offset, *rest: right(rows, keys, 0, *rest)
    )
    assert check.run("cpu") == 1
    text = capsys.readouterr().out
    assert "reference float16 24x16: WRONG" in text
    assert "  wrong: causal: " in text
    assert "  wrong: full" not in text


@pytest.mark.usefixtures("_small")
def test_calls_that_a_backend_does_not_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, native=library(classes=((64, 64),), dtypes=("float16",)))
    asked = NativeBackend.unsupported_reasons

    def picky(self: NativeBackend, request: Any, device: Any) -> list[str]:
        return ["no sinks today"] if request.sinks is not None else asked(self, request, device)

    monkeypatch.setattr(NativeBackend, "unsupported_reasons", picky)
    assert check.run("cpu") == 0
    text = capsys.readouterr().out
    assert "fa3 float16 64x64: ok (16 calls" in text
    assert text.count("  not taken: sinks: no sinks today\n") == 2


def test_a_gpu_for_which_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, cuda(7, 5))
    monkeypatch.setattr(check, "calls", lambda *_: [])
    assert check.run("cpu") == 0
    text = capsys.readouterr().out
    assert "fa2 NOT CHECKED: the device has compute capability 7.5" in text


@pytest.mark.usefixtures("_small")
def test_plain_attention() -> None:
    """Against the tests' own two readings of the spec: in numpy, row by row, and in torch."""
    for call in check.calls(torch.float16, (24, 16), SMALL, CPU):
        arguments = call.arguments if call.plain is None else call.plain
        out, lse = plain_attention(call.q, call.k, call.v, **arguments)
        others = {n: x for n, x in call.arguments.items() if n != "kv_layout"}
        naive, naive_lse = naive_attention(call.q, call.k, call.v, **others)
        tolerance = {"rtol": 1e-9, "atol": 1e-7 if call.name == "ALiBi" else 1e-9}
        torch.testing.assert_close(out, naive, **tolerance)
        torch.testing.assert_close(lse, naive_lse, **tolerance)
        if "packed_custom_mask" not in others:
            right = expect(call.q, call.k, call.v, **others)
            torch.testing.assert_close(out, right.out, **tolerance)
            torch.testing.assert_close(lse, right.lse, **tolerance)


def test_calls_use_every_backend_s_features() -> None:
    used = {
        name for call in check.calls(torch.float16, (64, 64), SMALL, CPU) for name in call.arguments
    }
    assert used >= {
        *("causal", "window_left", "custom_mask", "packed_custom_mask", "logits_soft_cap"),
        *("pos_encoding_mode", "sinks", "scale_q", "scale_k", "scale_v", "kv_layout"),
    }


@pytest.mark.usefixtures("_small")
def test_kernels_that_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are too large for the device's shared memory."""
    native = library(classes=((64, 64),), dtypes=("float16",), smem_bytes=200 << 10)
    pretend(monkeypatch, cuda(8, 6, 99 << 10), native)
    assert check.run("cpu") == 0
    text = capsys.readouterr().out
    assert "fa2 float16 64x64 NOT CHECKED: full: kernel fa2_float16_64x64 needs 204800" in text
    assert text.endswith("not checked: fa3, fa2 float16 64x64\n")


class Plain8(Float32Kernel):
    """Its weights are as coarse as those of e5m2."""

    def in_e4m3(self, weights: Tensor) -> Tensor:
        return super().in_e4m3(weights).to(torch.float8_e5m2).float()


@pytest.mark.parametrize("kind", [Float32Kernel, Plain8])
def test_kernels_of_float8(
    kind: type[StubKernel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Honest arithmetic passes and comes near what is allowed; one bit less does not."""
    native = library(archs={"fa3": ["90a-real"]}, classes=((128, 128),))
    pretend(monkeypatch, native=native, kind=kind)
    monkeypatch.setattr(check, "REFERENCE_HEAD_DIMS", ())
    assert check.run("cpu") == (kind is Plain8)
    text = capsys.readouterr().out
    for dtype in FLOAT8:
        told = re.search(rf"fa3 {dtype} 128x128: (\w+) \(17 calls, largest error ([\d.]+) of", text)
        assert told is not None
        assert told[1] == ("WRONG" if kind is Plain8 else "ok")
        assert kind is Plain8 or 0.4 < float(told[2]) < 1.0
    assert "fa3 float16 128x128: ok" in text


@pytest.mark.usefixtures("_small")
def test_a_call_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = pretend(monkeypatch, native=library(classes=((64, 64),), dtypes=("float16",)))

    def failing(self: Any, *args: Any) -> None:
        raise RuntimeError("cudaErrorNoKernelImageForDevice")

    monkeypatch.setattr(type(kernel), "__call__", failing)
    assert check.run("cpu") == 1
    assert "  wrong: full: cudaErrorNoKernelImageForDevice" in capsys.readouterr().out


def test_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.run("cuda:63") == 2
    answer = capsys.readouterr()
    assert "--device cuda:63 is not here; expected cpu or one of" in answer.err
    assert answer.out == ""


def test_device_of_the_check_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    monkeypatch.setattr(
        check, "calls", lambda dtype, dims, lengths, device: devices.append(device) or []
    )
    assert check.run("cpu") == 0
    assert set(devices) == {CPU}
    assert support.device_info(CPU).type == "cpu"
