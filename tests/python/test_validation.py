"""Every refusal: its type, and a text with the value given, what is allowed, what to do."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import prefill
from garbage import garbage
from prefill.request import make_request

QO, KV, HQ, HK, DQK, DVO = 5, 9, 8, 2, 64, 32
F32 = torch.float32


def tensors(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "q": torch.randn(QO, HQ, DQK).half(),
        "k": torch.randn(KV, HK, DQK).half(),
        "v": torch.randn(KV, HK, DVO).half(),
    }
    return call | changes


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


META = torch.device("meta")

REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    # kinds of object
    "q not a tensor": ({"q": [1.0]}, TypeError, ["q is [1.0] of type list", "torch.Tensor"]),
    "v None": ({"v": None}, TypeError, ["v is None", "torch.as_tensor"]),
    "causal int": ({"causal": 1}, TypeError, ["causal is 1 of type int", "True or False"]),
    "causal tensor": ({"causal": torch.ones(2)}, TypeError, ["causal is", "custom_mask"]),
    "return_lse None": ({"return_lse": None}, TypeError, ["return_lse is None"]),
    "fp16 flag": ({"use_fp16_qk_reduction": "yes"}, TypeError, ["use_fp16_qk_reduction is 'yes'"]),
    "kv_layout None": ({"kv_layout": None}, TypeError, ["kv_layout is None", "'NHD', 'HND'"]),
    "pos mode 0": (
        {"pos_encoding_mode": 0},
        TypeError,
        ["pos_encoding_mode is 0 of type int", "'NONE', 'ROPE_LLAMA', 'ALIBI'"],
    ),
    "backend object": ({"backend": 3}, TypeError, ["backend is 3 of type int", "'fa2'"]),
    "sm_scale string": ({"sm_scale": "1"}, TypeError, ["sm_scale is '1' of type str", "float"]),
    "sm_scale bool": ({"sm_scale": True}, TypeError, ["sm_scale is True of type bool"]),
    "sm_scale tensor": ({"sm_scale": torch.ones(())}, TypeError, ["sm_scale", "item()", "scale_q"]),
    "window float": ({"window_left": 2.0}, TypeError, ["window_left is 2.0", "int"]),
    "window bool": ({"window_left": True}, TypeError, ["window_left is True"]),
    "cap tensor": ({"logits_soft_cap": torch.ones(1)}, TypeError, ["logits_soft_cap", "float"]),
    "scale_q string": ({"scale_q": "x"}, TypeError, ["scale_q is 'x'"]),
    "alibi list": (
        {"alibi_slopes": [1.0] * HQ, "pos_encoding_mode": "ALIBI"},
        TypeError,
        ["alibi_slopes is [1.0", "torch.Tensor"],
    ),
    "sinks float": ({"sinks": 1.0}, TypeError, ["sinks is 1.0", "torch.Tensor"]),
    "out list": ({"out": []}, TypeError, ["out is []", "torch.Tensor"]),
    "mask list": ({"custom_mask": [[True]]}, TypeError, ["custom_mask is [[True]]"]),
    "packed list": ({"packed_custom_mask": [1]}, TypeError, ["packed_custom_mask is [1]"]),
    "q sparse": (
        {"q": half(QO, HQ, DQK).to_sparse()},
        TypeError,
        ["q has layout torch.sparse_coo", "q.to_dense()"],
    ),
    "v sparse": ({"v": half(KV, HK, DVO).to_sparse()}, TypeError, ["v has layout"]),
    "out sparse": ({"out": half(QO, HQ, DVO).to_sparse()}, TypeError, ["out has layout"]),
    "scale_q array": (
        {"scale_q": np.ones(4)},
        TypeError,
        ["scale_q is array([1., 1., 1., 1.]) of type ndarray", "torch.Tensor"],
    ),
    "scale_k array of one": ({"scale_k": np.ones(1)}, TypeError, ["scale_k is array([1.])"]),
    "kv_layout array": ({"kv_layout": np.ones(2)}, TypeError, ["kv_layout is array", "'NHD'"]),
    "pos mode tensor": (
        {"pos_encoding_mode": torch.ones(2)},
        TypeError,
        ["pos_encoding_mode is a tensor of shape (2,)", "'ALIBI'"],
    ),
    "backend array": ({"backend": np.ones(2)}, TypeError, ["backend is array", "'fa2'"]),
    "o_dtype array": ({"o_dtype": np.ones(2)}, TypeError, ["o_dtype is array"]),
    "lse_base array": ({"lse_base": np.ones(2)}, ValueError, ["lse_base=array"]),
    "sm_scale huge": ({"sm_scale": 10**400}, ValueError, ["sm_scale, of type int", "too large"]),
    # unknown words
    "kv_layout": ({"kv_layout": "nhd"}, ValueError, ["kv_layout='nhd'", "'NHD', 'HND'", "case"]),
    "pos mode": ({"pos_encoding_mode": "ROPE"}, ValueError, ["'ROPE'", "'ROPE_LLAMA'"]),
    "backend": ({"backend": "fa4"}, ValueError, ["backend='fa4'", "'auto', 'fa2', 'fa3'"]),
    "lse_base": ({"lse_base": "10"}, ValueError, ["lse_base='10'", "'2'", "'e'"]),
    "lse_base float": ({"lse_base": 2.0}, ValueError, ["lse_base=2.0"]),
    # shapes
    "q batch": ({"q": half(1, QO, HQ, DQK)}, ValueError, ["(1, 5, 8, 64)", "squeeze(0)"]),
    "k flat": ({"k": half(KV, DQK)}, ValueError, ["(9, 64)", "three dimensions"]),
    "v flat HND": ({"v": half(KV), "kv_layout": "HND"}, ValueError, ["k [num_kv_heads, kv_len"]),
    "kv_len": ({"v": half(KV + 1, HK, DVO)}, ValueError, ["kv_len is 9 in k and 10 in v"]),
    "kv heads": ({"v": half(KV, 1, DVO)}, ValueError, ["num_kv_heads is 2 in k and 1 in v"]),
    "head_dim": (
        {"k": half(KV, HK, 128)},
        ValueError,
        ["head_dim_qk is 64 in q and 128 in k", "kv_layout='HND'"],
    ),
    "kv_len HND": (
        {"k": half(HK, KV, DQK), "v": half(HK, KV + 1, DVO), "kv_layout": "HND"},
        ValueError,
        ["kv_len is 9 in k and 10 in v", "(2, 9, 64)", "kv_layout='NHD'"],
    ),
    "head dim 60": (
        {"q": half(QO, HQ, 60), "k": half(KV, HK, 60)},
        ValueError,
        ["head_dim_qk=60", "multiple of 8 from 8 to 256", "to 64", "sm_scale"],
    ),
    "head dim vo 20": ({"v": half(KV, HK, 20)}, ValueError, ["head_dim_vo=20", "to 24", "cut"]),
    "head dim 264": (
        {"q": half(QO, HQ, 264), "k": half(KV, HK, 264)},
        ValueError,
        ["head_dim_qk=264", "scaled_dot_product_attention"],
    ),
    "head dim 512": ({"v": half(KV, HK, 512)}, ValueError, ["head_dim_vo=512"]),
    "head dim 0": ({"v": half(KV, HK, 0)}, ValueError, ["head_dim_vo=0", "Empty"]),
    "group": (
        {"q": half(QO, 7, DQK)},
        ValueError,
        [
            "num_qo_heads=7 is not a multiple of num_kv_heads=2",
            "(5, 7, 64), (9, 2, 64), (9, 2, 32), read as q [qo_len, num_qo_heads",
            "pass kv_layout='HND'; if not, repeat the k and v heads.",
        ],
    ),
    "group, fewer query heads": (
        {"q": half(QO, 1, DQK), "kv_layout": "HND"},
        ValueError,
        [
            "num_qo_heads=1 is not a multiple of num_kv_heads=9",
            "(5, 1, 64), (9, 2, 64), (9, 2, 32), read as",
            "k [num_kv_heads, kv_len, head_dim_qk]",
            "pass kv_layout='NHD'.",
        ],
    ),
    "no kv heads": (
        {"k": half(KV, 0, DQK), "v": half(KV, 0, DVO)},
        ValueError,
        ["num_kv_heads=0", "pass kv_layout='HND'."],
    ),
    "mask shape": (
        {"custom_mask": torch.ones(QO, KV - 1, dtype=torch.bool)},
        ValueError,
        ["(5, 8)", "(5, 9)", "custom_mask", "Slice or expand it"],
    ),
    "mask transposed": (
        {"custom_mask": torch.ones(KV, QO, dtype=torch.bool)},
        ValueError,
        ["(9, 5)", "(5, 9)", "Transpose it: custom_mask.T."],
    ),
    "mask with a batch": (
        {"custom_mask": torch.ones(1, QO, KV, dtype=torch.bool)},
        ValueError,
        ["(1, 5, 9)", "custom_mask.reshape(5, 9)."],
    ),
    "mask flat": (
        {"custom_mask": torch.ones(QO * KV, dtype=torch.bool)},
        ValueError,
        ["(45,)", "row after row: custom_mask.reshape(5, 9)."],
    ),
    "mask per head": (
        {"custom_mask": torch.ones(HQ, QO, KV, dtype=torch.bool)},
        ValueError,
        ["(8, 5, 9)", "all heads", "Slice or expand it"],
    ),
    "packed short": (
        {"packed_custom_mask": torch.zeros(5, dtype=torch.uint8)},
        ValueError,
        ["(5,)", "(6,)", "qo_len=5, kv_len=9", "bitorder='little'"],
    ),
    "packed long": (
        {"packed_custom_mask": torch.zeros(7, dtype=torch.uint8)},
        ValueError,
        ["(7,)", "(6,)"],
    ),
    "packed 2d": (
        {"packed_custom_mask": torch.zeros(1, 6, dtype=torch.uint8)},
        ValueError,
        ["(1, 6)"],
    ),
    "scale_q length": (
        {"scale_q": torch.ones(HK)},
        ValueError,
        ["scale_q", "(2,)", "(8,)", "float"],
    ),
    "scale_k length": ({"scale_k": torch.ones(HQ)}, ValueError, ["[num_kv_heads] = (2,)", "(8,)"]),
    "scale_v 2d": ({"scale_v": torch.ones(HK, 1)}, ValueError, ["scale_v", "(2, 1)"]),
    "k_scale length": (
        {"k_scale": torch.ones(HK)},
        ValueError,
        ["k_scale", "one element", "scale_k"],
    ),
    "v_scale length": ({"v_scale": torch.ones(HK)}, ValueError, ["v_scale", "scale_v"]),
    "sinks length": ({"sinks": torch.ones(HK)}, ValueError, ["sinks", "[num_qo_heads] = (8,)"]),
    "sinks one": ({"sinks": torch.ones(1)}, ValueError, ["sinks", "(8,)"]),
    "alibi length": (
        {"alibi_slopes": torch.ones(4), "pos_encoding_mode": "ALIBI"},
        ValueError,
        ["alibi_slopes", "(4,)", "(8,)"],
    ),
    "out shape": ({"out": half(QO, HQ, DQK)}, ValueError, ["out", "(5, 8, 64)", "(5, 8, 32)"]),
    "lse shape": (
        {"lse": torch.zeros(HQ, QO), "return_lse": True},
        ValueError,
        ["lse", "(8, 5)", "[qo_len, num_qo_heads] = (5, 8)"],
    ),
    "out overlaps itself": (
        {"out": half(QO, 1, DVO).expand(QO, HQ, DVO)},
        ValueError,
        ["out", "(32, 0, 1)", "share memory"],
    ),
    # values
    "cap inf": ({"logits_soft_cap": float("inf")}, ValueError, ["logits_soft_cap=inf", "finite"]),
    "cap nan": ({"logits_soft_cap": float("nan")}, ValueError, ["logits_soft_cap=nan"]),
    "rope_scale 0": (
        {"rope_scale": 0.0, "pos_encoding_mode": "ROPE_LLAMA"},
        ValueError,
        ["rope_scale=0.0", "above 0"],
    ),
    "rope_theta": (
        {"rope_theta": -1, "pos_encoding_mode": "ROPE_LLAMA"},
        ValueError,
        ["rope_theta=-1.0", "above 0"],
    ),
    # arguments without effect
    "rope_scale alone": (
        {"rope_scale": 1.0},
        ValueError,
        ["rope_scale", "pos_encoding_mode='NONE'", "'ROPE_LLAMA'"],
    ),
    "rope_theta with ALIBI": (
        {"rope_theta": 1e4, "pos_encoding_mode": "ALIBI"},
        ValueError,
        ["rope_theta", "'ALIBI'"],
    ),
    "alibi alone": ({"alibi_slopes": torch.ones(HQ)}, ValueError, ["alibi_slopes", "'ALIBI'"]),
    "lse alone": ({"lse": torch.zeros(QO, HQ)}, ValueError, ["lse=", "return_lse=True"]),
    # dtypes
    "float32": (
        {"q": torch.zeros(QO, HQ, DQK)},
        TypeError,
        ["torch.float32", "float8_e4m3fn", "Cast the odd one with .to(dtype)."],
    ),
    "all float32": (
        {name: tensor.float() for name, tensor in tensors().items()},
        TypeError,
        ["torch.float32, torch.float32", "Cast all three with .half() or .bfloat16()."],
    ),
    "all foreign": (
        {
            "q": torch.zeros(QO, HQ, DQK),
            "k": half(KV, HK, DQK).double(),
            "v": half(KV, HK, DVO).int(),
        },
        TypeError,
        ["torch.float64, torch.int32", "Cast all three"],
    ),
    "mixed": ({"k": half(KV, HK, DQK).bfloat16()}, TypeError, ["torch.bfloat16", "Cast"]),
    "fp8 q alone": (
        {"q": half(QO, HQ, DQK).to(torch.float8_e4m3fn)},
        TypeError,
        ["torch.float8_e4m3fn, torch.float16"],
    ),
    "fp8 k alone": ({"k": half(KV, HK, DQK).to(torch.float8_e5m2)}, TypeError, ["float8_e5m2"]),
    "o_dtype int": ({"o_dtype": torch.int8}, TypeError, ["o_dtype=torch.int8", "torch.float32"]),
    "o_dtype string": ({"o_dtype": "half"}, TypeError, ["o_dtype is 'half'", "torch.dtype"]),
    "mask int": (
        {"custom_mask": torch.ones(QO, KV, dtype=torch.int32)},
        TypeError,
        ["torch.int32", "torch.bool", "mask != 0"],
    ),
    "mask uint8": (
        {"custom_mask": torch.ones(6, dtype=torch.uint8)},
        TypeError,
        ["torch.uint8", "packed_custom_mask"],
    ),
    "mask bias": ({"custom_mask": torch.zeros(QO, KV)}, TypeError, ["torch.float32", "bias"]),
    "packed bool": (
        {"packed_custom_mask": torch.ones(6, dtype=torch.bool)},
        TypeError,
        ["torch.bool", "torch.uint8", "packbits"],
    ),
    "scale dtype": (
        {"scale_q": torch.ones(HQ).double()},
        TypeError,
        ["scale_q", "torch.float64", ".float()"],
    ),
    "k_scale dtype": ({"k_scale": torch.ones((), dtype=torch.half)}, TypeError, ["k_scale"]),
    "sinks dtype": ({"sinks": torch.ones(HQ).half()}, TypeError, ["sinks", "torch.float16"]),
    "out dtype": (
        {"out": torch.zeros(QO, HQ, DVO)},
        TypeError,
        ["out", "torch.float32", "o_dtype"],
    ),
    "lse dtype": (
        {"lse": torch.zeros(QO, HQ).double(), "return_lse": True},
        TypeError,
        ["lse", "torch.float64", "torch.float32"],
    ),
    "fp16 reduction": (
        tensors()
        | {n: t.bfloat16() for n, t in tensors().items()}
        | {"use_fp16_qk_reduction": True},
        ValueError,
        ["use_fp16_qk_reduction=True", "torch.bfloat16", "torch.float16"],
    ),
    "fp16 reduction fp8 kv": (
        {n: t.to(torch.float8_e4m3fn) for n, t in tensors().items() if n != "q"}
        | {"use_fp16_qk_reduction": True},
        ValueError,
        ["use_fp16_qk_reduction", "float8_e4m3fn"],
    ),
    # devices
    "k elsewhere": ({"k": half(KV, HK, DQK).to(META)}, ValueError, ["k is on meta", "q is on cpu"]),
    "v elsewhere": ({"v": half(KV, HK, DVO).to(META)}, ValueError, ["v is on meta", "v.to('cpu')"]),
    "mask elsewhere": (
        {"custom_mask": torch.ones(QO, KV, dtype=torch.bool, device=META)},
        ValueError,
        ["custom_mask is on meta"],
    ),
    "packed elsewhere": (
        {"packed_custom_mask": torch.ones(6, dtype=torch.uint8, device=META)},
        ValueError,
        ["packed_custom_mask is on meta"],
    ),
    "scale elsewhere": (
        {"scale_v": torch.ones(HK, device=META)},
        ValueError,
        ["scale_v is on meta"],
    ),
    "out elsewhere": ({"out": half(QO, HQ, DVO).to(META)}, ValueError, ["out is on meta"]),
    # memory
    "k freed": (
        {"k": garbage("freed", half(KV, HK, DQK)), "kv_layout": "NHD"},
        ValueError,
        ["k of shape", f"needs a storage of {KV * HK * DQK * 2} bytes", "its own has 0", "a copy"],
    ),
    "out cut short": (
        {"out": garbage("cut short", half(QO, HQ, DVO))},
        ValueError,
        ["out of shape", "FSDP"],
    ),
    "mask cut short": (
        {"custom_mask": garbage("cut short", torch.ones(QO, KV, dtype=torch.bool))},
        ValueError,
        ["custom_mask of shape", f"its own has {QO * KV - 1}"],
    ),
    "sinks freed": (
        {"sinks": garbage("freed", torch.ones(HQ))},
        ValueError,
        ["sinks of shape"],
    ),
    # gradients
    "q grad": (
        {"q": half(QO, HQ, DQK).requires_grad_()},
        NotImplementedError,
        ["requires grad", "torch.no_grad()", "scaled_dot_product_attention"],
    ),
    "sinks grad": (
        {"sinks": torch.ones(HQ).requires_grad_()},
        NotImplementedError,
        ["sinks requires grad"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("call", [prefill.single_prefill_with_kv_cache, prefill.explain])
def test_refusal(name: str, call: Any) -> None:
    changes, error, texts = REFUSALS[name]
    with pytest.raises(error) as caught:
        call(**tensors(**changes))
    assert type(caught.value) is error
    message = str(caught.value)
    for text in texts:
        assert text in message, message
    assert message.endswith((".", ")")), message
    assert "  " not in message


def test_positional_order_is_the_documents() -> None:
    t = tensors()
    request = make_request(
        *t.values(),
        None,
        None,
        None,
        torch.float32,
        None,
        None,
        True,
        "NHD",
        "ROPE_LLAMA",
        True,
        0.5,
        3,
        30.0,
        2.0,
        1e5,
        "reference",
        True,
    )
    assert request.o_dtype == torch.float32
    assert request.causal
    assert request.use_fp16_qk_reduction
    assert request.sm_scale == 0.5
    assert request.window_left == 3
    assert request.logits_soft_cap == 30.0
    assert (request.rope_scale, request.rope_theta) == (2.0, 1e5)
    assert request.backend == "reference"
    assert request.return_lse
    too_many = [None] * 17 + [1.0]
    with pytest.raises(TypeError, match="positional"):
        prefill.single_prefill_with_kv_cache(*t.values(), *too_many)


def test_defaults() -> None:
    request = make_request(**tensors())
    assert request.sm_scale == DQK**-0.5
    assert request.o_dtype == torch.float16
    assert request.v_scale == 1.0
    assert request.window_left == -1
    assert request.logits_soft_cap == 0.0
    assert (request.rope_scale, request.rope_theta) == (1.0, 1e4)
    assert request.lse_base == "2"
    assert (request.qo_len, request.kv_len) == (QO, KV)
    assert (request.num_qo_heads, request.num_kv_heads) == (HQ, HK)
    assert (request.head_dim_qk, request.head_dim_vo) == (DQK, DVO)
    assert not request.causal
    assert not request.return_lse
    for name in ("scale_q", "scale_k", "scale_v", "custom_mask", "packed_custom_mask", "sinks"):
        assert getattr(request, name) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_output_defaults_to_bfloat16(dtype: torch.dtype) -> None:
    fp8 = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    assert make_request(**fp8).o_dtype == torch.bfloat16
    assert make_request(**fp8, o_dtype=torch.float16).o_dtype == torch.float16
    half_q = fp8 | {"q": tensors()["q"]}
    assert make_request(**half_q).o_dtype == torch.float16


def test_hnd_is_a_view() -> None:
    t = tensors()
    k, v = t["k"].transpose(0, 1).contiguous(), t["v"].transpose(0, 1).contiguous()
    request = make_request(t["q"], k, v, kv_layout="HND")
    assert request.k.shape == (KV, HK, DQK)
    assert request.k.data_ptr() == k.data_ptr()
    assert request.v.stride() == (DVO, KV * DVO, 1)


def test_switches_that_mean_off() -> None:
    for cap in (None, 0, 0.0, -3.0):
        assert make_request(**tensors(), logits_soft_cap=cap).logits_soft_cap == 0.0
    for window in (-1, -7):
        assert make_request(**tensors(), window_left=window).window_left == -1
    assert make_request(**tensors(), window_left=np.int64(4)).window_left == 4
    assert make_request(**tensors(), sm_scale=np.float32(0.5)).sm_scale == 0.5
    assert make_request(**tensors(), sm_scale=-2).sm_scale == -2.0
    assert make_request(**tensors(), sm_scale=0).sm_scale == 0.0
    assert make_request(**tensors(), lse_base=2).lse_base == "2"
    assert make_request(**tensors(), lse_base="e").lse_base == "e"


def test_float_scales_fold() -> None:
    request = make_request(
        **tensors(), sm_scale=2.0, scale_q=3.0, scale_k=5, k_scale=7.0, scale_v=11.0, v_scale=13.0
    )
    assert request.sm_scale == 210.0
    assert request.v_scale == 143.0
    assert request.scale_q is None
    assert request.scale_k is None
    assert request.scale_v is None


def test_one_element_scales_expand() -> None:
    for one in (torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[2.0]])):
        request = make_request(**tensors(), scale_q=one, scale_k=one, scale_v=one)
        assert request.scale_q is not None
        assert request.scale_q.shape == (HQ,)
        assert request.scale_q.stride() == (0,)
        assert request.scale_k is not None
        assert request.scale_k.shape == (HK,)
        assert request.scale_v is not None
        assert request.scale_v.tolist() == [2.0] * HK


def test_tensor_k_and_v_scales_join_the_head_scales() -> None:
    per_head = torch.tensor([1.0, 10.0])
    request = make_request(
        **tensors(), scale_k=per_head, k_scale=torch.tensor(3.0), v_scale=torch.tensor([4.0])
    )
    assert request.scale_k is not None
    assert request.scale_k.tolist() == [3.0, 30.0]
    assert request.scale_v is not None
    assert request.scale_v.tolist() == [4.0, 4.0]
    assert per_head.tolist() == [1.0, 10.0]


def test_packed_mask_wins() -> None:
    packed = torch.zeros(6, dtype=torch.uint8)
    request = make_request(
        **tensors(), custom_mask=torch.ones(1, 1), packed_custom_mask=packed, causal=False
    )
    assert request.custom_mask is None
    assert request.packed_custom_mask is packed


def test_causal_with_mask_warns_once_and_the_mask_decides() -> None:
    mask = torch.ones(QO, KV, dtype=torch.bool)
    with pytest.warns(
        UserWarning, match=r"causal=True has no effect.*custom mask.*causal=False"
    ) as caught:
        prefill.single_prefill_with_kv_cache(**tensors(), custom_mask=mask, causal=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        request = make_request(**tensors(), custom_mask=mask, causal=True)
    assert not request.causal


def test_no_grad_and_inference_mode_take_tensors_that_require_grad() -> None:
    t = tensors(q=half(QO, HQ, DQK).requires_grad_())
    with torch.no_grad():
        assert not prefill.single_prefill_with_kv_cache(**t).requires_grad
    with torch.inference_mode():
        prefill.single_prefill_with_kv_cache(**t)


def test_results_of_any_strides_are_filled() -> None:
    t = tensors()
    wide = torch.full((QO, HQ, DVO + 3), 7.0, dtype=torch.float16)
    out = wide[..., 1 : DVO + 1]
    lse = torch.zeros(HQ, QO).t()
    result, result_lse = prefill.single_prefill_with_kv_cache(
        **t, return_lse=True, out=out, lse=lse
    )
    assert result is out
    assert result_lse is lse
    expected, expected_lse = prefill.single_prefill_with_kv_cache_return_lse(**t)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert (wide[..., 0] == 7).all()
    assert (wide[..., DVO + 1 :] == 7).all()


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((QO, HQ, DVO), (0, DVO, 1)),
        ((QO, HQ, DVO), (DVO, DVO, 1)),  # rows on top of the heads
        ((QO, HQ, DVO), (HQ * DVO - 1, DVO, 1)),
        ((QO, HQ, DVO), (HQ * DVO, DVO - 1, 1)),
        ((QO, HQ, DVO), (1, QO * DVO, QO - 1)),
    ],
)
def test_results_that_overlap_themselves(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    out = torch.zeros(QO * HQ * DVO * 2).half().as_strided(size, stride)
    with pytest.raises(ValueError, match="share memory"):
        prefill.single_prefill_with_kv_cache(**tensors(), out=out)
    lse = torch.zeros(QO + HQ).as_strided((QO, HQ), (1, 1))
    with pytest.raises(ValueError, match="share memory"):
        prefill.single_prefill_with_kv_cache(**tensors(), return_lse=True, lse=lse)


def test_signature_is_the_documents() -> None:
    import inspect

    parameters = inspect.signature(prefill.single_prefill_with_kv_cache).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == re.findall(
        r"\w+",
        """q, k, v, scale_q, scale_k, scale_v, o_dtype, custom_mask, packed_custom_mask, causal,
        kv_layout, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left,
        logits_soft_cap, rope_scale, rope_theta, backend, return_lse""",
    )
    keyword = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keyword == ["k_scale", "v_scale", "out", "lse", "alibi_slopes", "sinks", "lse_base"]
    documented = prefill.single_prefill_with_kv_cache.__doc__
    assert documented is not None
    for name in positional + keyword:
        assert re.search(rf"^ +{name}: ", documented, re.MULTILINE), name
