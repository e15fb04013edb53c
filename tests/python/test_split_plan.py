"""How `explain` asks for the library's plan of a call, and how it tells of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prefill
from fakes import WHOLE, cuda, library, pretend, pretend_build
from prefill import support
from prefill.__main__ import main
from prefill.devices import DEVICES, device_info_of, typical_num_sms
from prefill.explain import explain_request
from prefill.request import make_request
from prefill.split_plan import SplitPlan, split_plan

QO, KV, HQ, HK, D = 5, 9, 4, 2, 64
PACKED = SplitPlan(packed_heads=8, num_splits=33, num_row_tiles=4, num_whole_tiles=0)
TAIL = SplitPlan(packed_heads=1, num_splits=3, num_row_tiles=140, num_whole_tiles=132)
needs_library = pytest.mark.skipif(support.native().build is None, reason="no library")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((QO, HQ, D), (KV, HK, D), (KV, HK, 32))
    q, k, v = (torch.zeros(shape).half() for shape in shapes)
    return q, k, v


MASK = torch.ones(QO, KV, dtype=torch.bool)
SLOPES, SCALES = torch.ones(HQ), torch.ones(HQ)
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"window_right": 0}),
    "window": ({"window_left": 3}, {"window_left": 3}),
    "a window over all keys": ({"window_left": KV - 1}, {}),
    "bool mask": ({"custom_mask": MASK}, {}),
    "packed mask": ({"packed_custom_mask": prefill.packbits(MASK)}, {}),
    "ALiBi": ({"pos_encoding_mode": "ALIBI"}, {"packs": False}),
    "slopes": ({"pos_encoding_mode": "ALIBI", "alibi_slopes": SLOPES}, {"packs": False}),
    "RoPE": ({"pos_encoding_mode": "ROPE_LLAMA"}, {}),
    "q scales per head": ({"scale_q": SCALES}, {"packs": False}),
    "a q scale": ({"scale_q": 2.0}, {}),
    "one q scale in a tensor": ({"scale_q": torch.tensor([2.0])}, {}),
    "k and v scales": ({"scale_k": torch.ones(HK), "v_scale": torch.tensor(2.0)}, {}),
    "soft cap and sinks": ({"logits_soft_cap": 30.0, "sinks": SLOPES}, {}),
    "fa2": ({"backend": "fa2"}, {"backend": "fa2"}),
    "HND": ({"kv_layout": "HND"}, {}),
    "the output of q": ({"o_dtype": torch.float16}, {}),
    "another 16-bit output": ({"o_dtype": torch.bfloat16}, {"only_parts": True}),
    "a float32 output": ({"o_dtype": torch.float32}, {"only_parts": True}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_asked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments, changed = CHANGES[name]
    stub = pretend_build(monkeypatch)
    q, k, v = inputs()
    if "kv_layout" in arguments:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    explain_request(make_request(q, k, v, **arguments), cuda(9, 0, num_sms=78))
    asked = {
        "backend": "fa3",
        "dtype": "float16",
        "qo_len": QO,
        "kv_len": KV,
        "num_qo_heads": HQ,
        "num_kv_heads": HK,
        "head_dim_qk": D,
        "head_dim_vo": 32,
        "window_left": -1,
        "window_right": -1,
        "packs": True,
        "only_parts": False,
        "num_sms": 78,
        "num_splits": 0,
    }
    assert stub.calls == [asked | changed]


@pytest.mark.parametrize(
    ("o_dtype", "widened", "only_parts"),
    [
        (None, "bfloat16", False),
        (torch.bfloat16, "bfloat16", False),
        (torch.float16, "float16", False),
        (torch.float32, "float16", True),
    ],
)
def test_the_dtype_of_float8_queries(
    monkeypatch: pytest.MonkeyPatch, o_dtype: torch.dtype | None, widened: str, only_parts: bool
) -> None:
    """Tiles differ by it; a kernel of float8 writes bfloat16, and any other output by parts."""
    wide = (x.new_zeros(*x.shape[:2], 96) for x in inputs())
    call = make_request(*(x.to(torch.float8_e5m2) for x in wide), o_dtype=o_dtype)
    native_parts = o_dtype not in (None, torch.bfloat16)
    for backend, float8, asked in (
        ("fa3", ("float8_e5m2",), ("float8_e5m2", native_parts)),
        ("fa3", ("float8_e4m3fn",), (widened, only_parts)),
        ("fa3", (), (widened, only_parts)),
        ("fa2", ("float8_e5m2",), (widened, only_parts)),
    ):
        stub = pretend_build(monkeypatch, library(float8=float8))
        assert split_plan(backend, call, 132) == WHOLE
        assert (stub.calls[0]["dtype"], stub.calls[0]["only_parts"]) == asked


def test_the_dtype_is_that_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = pretend_build(monkeypatch)
    q, k, v = inputs()
    call = make_request(q.bfloat16(), *(x.to(torch.float8_e4m3fn) for x in (k, v)))
    assert split_plan("fa2", call, 108, num_splits=7) == WHOLE
    assert (stub.calls[0]["dtype"], stub.calls[0]["num_splits"]) == ("bfloat16", 7)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (WHOLE, "splits: 1\n"),
        (PACKED, "splits: 33, 8 query heads packed in a row tile\n"),
        (TAIL, "splits: 3 (the last 8 of 140 row tiles alone)\n"),
        (SplitPlan(2, 1, 4, 4), "splits: 1, 2 query heads packed in a row tile\n"),
    ],
)
def test_what_is_told(monkeypatch: pytest.MonkeyPatch, plan: SplitPlan, text: str) -> None:
    pretend_build(monkeypatch, plan=plan)
    q, k, _ = inputs()
    told = explain_request(make_request(q, k, k), cuda(9, 0))
    assert told.num_splits == plan.num_splits
    assert told.packed_heads == plan.packed_heads
    assert told.num_row_tiles == plan.num_row_tiles
    assert told.num_whole_tiles == plan.num_whole_tiles
    assert f"kernel:  fa3_float16_64x64, tile 128 x 128, {text}" in f"{told}\n"


def test_without_a_kernel_no_plan_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = pretend_build(monkeypatch, plan=PACKED)
    q, k, _ = inputs()
    for call, num_splits in (
        (make_request(q, k, k, backend="reference"), 1),
        (make_request(q, k[:0], k[:0]), 0),
        (make_request(q, k, k, backend="fa3"), 0),
    ):
        told = explain_request(call, cuda(8, 0))
        assert (told.num_splits, told.packed_heads) == (num_splits, 1)
        assert (told.num_row_tiles, told.num_whole_tiles) == (0, 0)
    assert stub.calls == []


def test_a_call_asks_for_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library plans for itself; what `explain` asks costs a call nothing."""
    pretend(monkeypatch)
    stub = pretend_build(monkeypatch)
    q, k, _ = inputs()
    prefill.single_prefill_with_kv_cache(q, k, k)
    assert stub.calls == []


@pytest.mark.parametrize(
    ("device", "num_sms"),
    [
        *(
            (name, device.num_sms)
            for name, device in DEVICES.items()
            if name not in ("v100", "t4")  # no kernel runs there
        ),
        ("H200", 132),
        ("sm_80", 108),
        ("sm_86", 72),
        ("sm_87", 72),
        ("sm_89", 58),
        ("sm_90a", 132),
        ("sm_103", 148),
        ("sm_120", 170),
    ],
)
def test_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    num_sms: int,
) -> None:
    stub = pretend_build(monkeypatch, plan=PACKED)
    call = ["explain", "--qo-len", "1", "--kv-len", "32768", "--heads", "32/4"]
    assert main([*call, "--device", device]) == 0
    assert "splits: 33, 8 query heads packed in a row tile\n" in capsys.readouterr().out
    [asked] = stub.calls
    assert asked["num_sms"] == num_sms
    assert (asked["qo_len"], asked["kv_len"]) == (1, 32768)
    assert (asked["num_qo_heads"], asked["num_kv_heads"]) == (32, 4)


def test_sms_of_a_capability() -> None:
    assert typical_num_sms((6, 1)) == 0
    assert typical_num_sms((7, 0)) == device_info_of("v100").num_sms == 80
    assert typical_num_sms((7, 5)) == device_info_of("t4").num_sms == 40
    assert device_info_of("sm_75").num_sms == 40
    assert device_info_of("cpu").num_sms == 0


@needs_library
@pytest.mark.parametrize("device", ["a100", "4090", "h200"])
def test_the_library_plans_without_a_device(device: str) -> None:
    """One row over many keys leaves most SMs idle unless the keys are split."""
    build = support.native().build
    assert build is not None
    kernel = build.kernels_of("fa2")[0]
    dtype = getattr(torch, kernel.dtype)

    def plan(qo_len: int, kv_len: int, **arguments: Any) -> SplitPlan:
        shapes = ((qo_len, 32, kernel.head_dim_qk), (kv_len, 4, kernel.head_dim_qk))
        q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        v = torch.empty(kv_len, 4, kernel.head_dim_vo, dtype=dtype, device="meta")
        num_splits = arguments.pop("num_splits", 0)
        request = make_request(q, k, v, **arguments)
        return split_plan("fa2", request, device_info_of(device).num_sms, num_splits)

    decode = plan(1, 32768)
    assert decode.packed_heads == 8
    assert decode.num_row_tiles == 4
    assert 1 < decode.num_splits <= 256
    assert decode.num_whole_tiles == 0
    assert plan(1, 32768, pos_encoding_mode="ALIBI").packed_heads == 1
    assert plan(1, 1).num_splits == 1
    assert plan(1, 32768, num_splits=5).num_splits == 5
    assert plan(1, 32768, num_splits=1).num_splits == 1
    [other] = {torch.float16, torch.bfloat16} - {dtype}
    for o_dtype in (other, torch.float32):
        assert plan(1, 32768, o_dtype=o_dtype) == decode
        whole, parts = plan(32768, 32768), plan(32768, 32768, o_dtype=o_dtype)
        assert whole.num_whole_tiles == whole.num_row_tiles == parts.num_row_tiles
        assert (parts.num_whole_tiles, parts.num_splits) == (0, 1)
