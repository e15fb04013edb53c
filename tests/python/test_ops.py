"""What reaches the native op, and the empty calls that never do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import prefill
from fakes import StubKernel, pretend
from prefill import ops
from prefill.request import make_request

QO, KV, HQ, HK, D = 5, 9, 4, 2, 64
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubKernel:
    return pretend(monkeypatch)


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def run(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
    return prefill.single_prefill_with_kv_cache(q, k, v, **kwargs)


def only_call(stub: StubKernel) -> dict[str, Any]:
    [call] = stub.calls
    return call


def check(result: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> None:
    """The whole way through the stub agrees with the reference."""
    kwargs.pop("out", None), kwargs.pop("lse", None)
    expected = run(q, k, v, **kwargs, backend="reference")
    if not isinstance(result, tuple):
        result, expected = (result,), (expected,)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


def test_contiguous_tensors_go_as_they_are(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, 32)
    out = run(q, k, v)
    call = only_call(stub)
    assert call["q"].data_ptr() == q.data_ptr()
    assert call["k"].data_ptr() == k.data_ptr()
    assert call["v"].data_ptr() == v.data_ptr()
    assert call["out"].data_ptr() == out.data_ptr()
    assert call["lse"] is None
    assert call["backend"] == "fa3"
    assert (call["window_left"], call["window_right"]) == (-1, -1)
    assert call["sm_scale"] == D**-0.5
    assert (call["v_scale"], call["lse_scale"]) == (1.0, 1.0)
    assert out.is_contiguous()
    assert out.shape == (QO, HQ, 32)
    check(out, q, k, v)


def test_hnd_and_slices_are_views(stub: StubKernel) -> None:
    fused = half(QO, HQ + 2 * HK, D)
    q, k, v = fused.split([HQ, HK, HK], 1)
    check(run(q, k, v), q, k, v)
    assert only_call(stub)["k"].data_ptr() == k.data_ptr()
    assert only_call(stub)["k"].stride() == k.stride()
    stub.calls.clear()
    cache = half(2, HK, 100, D)
    k, v = cache[0, :, 3 : 3 + KV], cache[1, :, 3 : 3 + KV]
    q = half(QO, HQ, D)
    check(run(q, k, v, kv_layout="HND"), q, k, v, kv_layout="HND")
    assert only_call(stub)["k"].data_ptr() == k.data_ptr()
    assert only_call(stub)["k"].stride() == (D, 100 * D, 1)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_kernels_cannot_address_is_copied(stub: StubKernel, which: str) -> None:
    shape = {"q": (QO, HQ, D), "k": (KV, HK, D), "v": (KV, HK, D)}[which]
    odd = {
        "last stride 2": half(*shape[:2], 2 * D)[..., ::2],
        "outer stride": half(*shape[:2], D + 1)[..., :D],
        "token stride": torch.as_strided(half(10000), shape, (shape[1] * D + 4, D, 1)),
        "address": half(math.prod(shape) + 1)[1:].view(shape),
        "transposed": half(D, *shape[:2]).permute(1, 2, 0),
    }
    for name, tensor in odd.items():
        stub.calls.clear()
        call = {"q": half(QO, HQ, D), "k": half(KV, HK, D), "v": half(KV, HK, D)} | {which: tensor}
        check(run(**call), **call)
        sent = only_call(stub)[which]
        assert sent.data_ptr() != tensor.data_ptr(), name
        assert sent.is_contiguous(), name
        assert sent.data_ptr() % 16 == 0, name
        assert torch.equal(sent, tensor), name


def test_strides_of_size_1_dims_do_not_matter(stub: StubKernel) -> None:
    q = torch.as_strided(half(HQ * D), (1, HQ, D), (1, D, 1))
    k = torch.as_strided(half(KV * D), (KV, 1, D), (D, 3, 1))
    v = torch.as_strided(half(KV * D), (KV, 1, D), (D, 0, 1))
    check(run(q, k, v), q, k, v)
    call = only_call(stub)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        assert call[name].data_ptr() == tensor.data_ptr()
        assert call[name].stride() == tensor.stride()


def test_broadcast_heads_are_views(stub: StubKernel) -> None:
    k = half(KV, 1, D).expand(KV, HQ, D)
    q = half(QO, HQ, D)
    check(run(q, k, k), q, k, k)
    assert only_call(stub)["k"].stride() == (D, 0, 1)


@pytest.mark.parametrize(
    ("kwargs", "bounds"),
    [
        ({}, (-1, -1)),
        ({"causal": True}, (-1, 0)),
        ({"window_left": 0}, (0, -1)),
        ({"window_left": 3, "causal": True}, (3, 0)),
        ({"window_left": -5}, (-1, -1)),
        ({"window_left": KV - 2}, (KV - 2, -1)),
        ({"window_left": KV - 1}, (-1, -1)),
        ({"window_left": 1 << 40}, (-1, -1)),
    ],
)
@pytest.mark.parametrize("qo_len", [1, 5, 9, 12])
def test_bounds(stub: StubKernel, kwargs: Any, bounds: tuple[int, int], qo_len: int) -> None:
    q, k, v = half(qo_len, HQ, D), half(KV, HK, D), half(KV, HK, D)
    check(run(q, k, v, **kwargs, return_lse=True), q, k, v, **kwargs, return_lse=True)
    call = only_call(stub)
    assert (call["window_left"], call["window_right"]) == bounds


def test_scales_reach_the_op(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    kwargs: dict[str, Any] = {
        "scale_q": torch.rand(HQ) + 0.5,
        "scale_k": torch.rand(HK) + 0.5,
        "k_scale": torch.tensor(0.75),
        "scale_v": torch.tensor([1.5]),
        "v_scale": 2.0,
        "sm_scale": 0.1,
        "return_lse": True,
    }
    check(run(q, k, v, **kwargs), q, k, v, **kwargs)
    call = only_call(stub)
    assert call["sm_scale"] == 0.1
    assert call["v_scale"] == 2.0
    assert torch.equal(call["scale_q"], kwargs["scale_q"])
    torch.testing.assert_close(call["scale_k"], kwargs["scale_k"] * 0.75)
    assert call["scale_v"].tolist() == [1.5, 1.5]

    stub.calls.clear()
    kwargs = {"scale_q": 2.0, "scale_k": 3.0, "k_scale": 0.5, "scale_v": 4.0, "sm_scale": 0.1}
    check(run(q, k, v, **kwargs), q, k, v, **kwargs)
    call = only_call(stub)
    assert call["sm_scale"] == pytest.approx(0.3)
    assert call["v_scale"] == 4.0
    assert call["scale_q"] is None


def test_each_scale_alone(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    plain = run(q, k, v, return_lse=True)
    for name, heads in (("scale_q", HQ), ("scale_k", HK), ("scale_v", HK)):
        for scale in (3.0, torch.tensor(3.0), torch.arange(1.0, heads + 1)):
            kwargs = {name: scale, "return_lse": True}
            result = run(q, k, v, **kwargs)
            check(result, q, k, v, **kwargs)
            assert not torch.equal(result[0], plain[0])
            assert torch.equal(result[1], plain[1]) == (name == "scale_v")


def test_lse_base(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    _, base_2 = run(q, k, v, return_lse=True)
    _, base_e = run(q, k, v, return_lse=True, lse_base="e")
    assert [c["lse_scale"] for c in stub.calls] == [1.0, math.log(2.0)]
    torch.testing.assert_close(base_e, base_2 * math.log(2.0))
    check((run(q, k, v), base_e), q, k, v, return_lse=True, lse_base="e")


def test_given_results(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    cases = {
        "contiguous": (half(QO, HQ, D), True),
        "wide": (half(QO, HQ, D + 8)[..., :D], True),
        "transposed": (half(HQ, QO, D).transpose(0, 1), True),
        "odd": (half(QO, HQ, D + 1)[..., :D], False),
        "address": (half(QO * HQ * D + 1)[1:].view(QO, HQ, D), False),
        "last stride": (half(QO, HQ, 2 * D)[..., ::2], False),
    }
    for name, (out, direct) in cases.items():
        stub.calls.clear()
        lse = torch.empty(HQ, QO).t()
        result = run(q, k, v, out=out, lse=lse, return_lse=True)
        assert result[0] is out, name
        assert result[1] is lse, name
        assert (only_call(stub)["out"].data_ptr() == out.data_ptr()) == direct, name
        assert only_call(stub)["lse"].data_ptr() == lse.data_ptr()
        check(result, q, k, v, return_lse=True)


@pytest.mark.parametrize("window_left", [-1, 2])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(QO, KV), (8, 12), (1, 1), (3, 11)])
def test_masks_reach_the_op_where_they_lie(
    stub: StubKernel, qo_len: int, kv_len: int, window_left: int
) -> None:
    """Any address and row stride; only what is not dense in the last dimension is copied."""
    q, k, v = half(qo_len, HQ, D), half(kv_len, HK, D), half(kv_len, HK, D)
    keep = torch.arange(qo_len * kv_len).view(qo_len, kv_len) % 3 != 0
    bits = prefill.packbits(keep, bitorder="little")
    more = bits.clone()
    if qo_len * kv_len % 8:
        more[-1] |= 0x80  # past the end
    given: list[dict[str, Any]] = [
        {"custom_mask": keep},
        {"custom_mask": torch.empty(qo_len, kv_len + 3).bool()[:, 1:-2].copy_(keep)},
        {"custom_mask": torch.empty(qo_len, 2 * kv_len).bool()[:, ::2].copy_(keep)},
        {"custom_mask": keep.t().contiguous().t()},
        {"packed_custom_mask": bits},
        {"packed_custom_mask": bits, "custom_mask": ~keep},
        {"packed_custom_mask": more},
        {"packed_custom_mask": torch.empty(len(bits) + 1).byte()[1:].copy_(bits)},
        {"packed_custom_mask": torch.empty(2 * len(bits)).byte()[::2].copy_(bits)},
    ]
    for mask in given:
        kwargs = mask | {"window_left": window_left, "return_lse": True}
        stub.calls.clear()
        result = run(q, k, v, **kwargs)
        check(result, q, k, v, custom_mask=keep, window_left=window_left, return_lse=True)
        call = only_call(stub)
        assert call["window_right"] == -1
        tensor = mask.get("packed_custom_mask", mask.get("custom_mask"))
        assert torch.equal(call["mask"], tensor)
        is_dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        assert (call["mask"].data_ptr() == tensor.data_ptr()) == is_dense


def test_a_row_for_all(stub: StubKernel) -> None:
    """Padding given as one row of a mask is not copied for the others."""
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    keep = (torch.arange(KV) < KV - 2).expand(QO, KV)
    check(run(q, k, v, custom_mask=keep), q, k, v, custom_mask=keep)
    assert only_call(stub)["mask"].stride() == (0, 1)


def test_logit_terms_reach_the_op(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    slopes, sinks = torch.rand(HQ), torch.randn(HQ)
    sent = {"mask": None, "alibi": False, "alibi_slopes": None, "sinks": None, "soft_cap": 0.0}
    sent |= {"rope": False, "rope_scale": 1.0, "rope_theta": 1e4}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"logits_soft_cap": 2.0}, {"soft_cap": 2.0}),
        ({"logits_soft_cap": -2.0}, {}),
        ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
        (
            {"pos_encoding_mode": "ALIBI", "alibi_slopes": slopes},
            {"alibi": True, "alibi_slopes": slopes},
        ),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, {"rope": True}),
        (
            {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 8.0, "rope_theta": 5e5},
            {"rope": True, "rope_scale": 8.0, "rope_theta": 5e5},
        ),
        ({"sinks": sinks}, {"sinks": sinks}),
        (
            {"logits_soft_cap": 3.0, "pos_encoding_mode": "ALIBI", "sinks": sinks},
            {"soft_cap": 3.0, "alibi": True, "sinks": sinks},
        ),
    ]
    for kwargs, changed in cases:
        stub.calls.clear()
        kwargs = kwargs | {"return_lse": True, "causal": True}
        check(run(q, k, v, **kwargs), q, k, v, **kwargs)
        call = only_call(stub)
        for name, value in (sent | changed).items():
            assert call[name] is value or call[name] == value, name


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("v_dtype", FP8)
@pytest.mark.parametrize("k_dtype", FP8)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16, *FP8])
def test_fp8_reaches_the_op_where_it_lies(
    stub: StubKernel, q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype, rope: bool
) -> None:
    """The op widens and rotates; Python copies only what no kernel and no pass can address."""
    arguments: dict[str, Any] = {"causal": True, "return_lse": True, "scale_k": torch.rand(HK)}
    arguments |= {"k_scale": 0.5, "v_scale": 2.0}
    if rope:
        arguments |= {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e5}
    q = half(QO, HQ, D).to(q_dtype)
    fused = half(KV, 2 * HK, D)
    k, v = fused[:, :HK].to(k_dtype), fused[:, HK:].to(v_dtype)
    odd_v = torch.empty(KV, HK, D + 4).to(v_dtype)[..., :D].copy_(v)
    off_v = torch.empty(KV * HK * D + 8).to(v_dtype)[8:].view(KV, HK, D).copy_(v)
    for given, is_copied in ((v, False), (odd_v, True), (off_v, True)):
        stub.calls.clear()
        result = run(q, k, given, **arguments)
        assert result[0].dtype == (torch.bfloat16 if q_dtype in FP8 else q_dtype)
        expected = run(q, k, v, backend="reference", **arguments)
        tolerance = 2e-3 if q_dtype == torch.float16 else 2e-2
        torch.testing.assert_close(result[0], expected[0], rtol=tolerance, atol=1e-5)
        torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-5)
        call = only_call(stub)
        assert call["q"].data_ptr() == q.data_ptr()
        assert call["q"].dtype == q_dtype
        assert call["k"].data_ptr() == k.data_ptr()
        assert (call["k"].dtype, call["v"].dtype) == (k_dtype, v_dtype)
        assert (call["v"].data_ptr() != given.data_ptr()) == is_copied
        assert call["v"].data_ptr() % 16 == 0
        assert torch.equal(call["v"].half(), v.half())


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8])
def test_every_output_is_the_op_s(
    stub: StubKernel, dtype: torch.dtype, o_dtype: torch.dtype
) -> None:
    """The op writes `out` whatever its dtype, into a copy alone where it cannot address it."""
    q, k, v = (half(n, h, D).to(dtype) for n, h in ((QO, HQ), (KV, HK), (KV, HK)))
    expected = run(q, k, v, backend="reference", o_dtype=o_dtype)
    odd = torch.empty(QO, HQ, D + 4, dtype=o_dtype)[..., :D]
    for out in (None, torch.empty(QO, HQ, D, dtype=o_dtype), odd):
        stub.calls.clear()
        result = run(q, k, v, o_dtype=o_dtype, out=out)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
        assert out is None or result is out
        given = only_call(stub)["out"]
        assert given.dtype == o_dtype
        assert (given.data_ptr() == result.data_ptr()) == (out is not odd)


def test_no_visible_keys(stub: StubKernel) -> None:
    q, k, v = half(QO, HQ, D), half(KV, HK, D), half(KV, HK, D)
    sinks = torch.randn(HQ)
    nothing = torch.zeros(QO, KV, dtype=torch.bool)
    out, lse = run(q, k, v, custom_mask=nothing, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    out, lse = run(q, k, v, custom_mask=nothing, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, (sinks / math.log(2.0)).expand(QO, HQ))


@pytest.mark.parametrize("base", ["2", "e"])
def test_no_keys_but_sinks(stub: StubKernel, base: str) -> None:
    q, kv, sinks = half(QO, HQ, D), half(0, HK, D), torch.randn(HQ)
    out, lse = run(q, kv, kv, return_lse=True, sinks=sinks, lse_base=base)
    assert (out == 0).all()
    unit = 1.0 if base == "e" else math.log(2.0)
    torch.testing.assert_close(lse, (sinks / unit).expand(QO, HQ))
    _, exact = run(q, kv, kv, return_lse=True, sinks=sinks, lse_base=base, backend="reference")
    torch.testing.assert_close(lse, exact)
    assert stub.calls == []


@pytest.mark.parametrize("base", ["2", "e"])
def test_no_keys(stub: StubKernel, base: str) -> None:
    q, kv = half(QO, HQ, D), half(0, HK, D)
    out, lse = run(q, kv, kv, return_lse=True, causal=True, lse_base=base)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    given = torch.full((QO, HQ, D), math.nan, dtype=torch.float16)
    assert run(q, kv, kv, out=given) is given
    assert (given == 0).all()
    assert stub.calls == []


def test_no_rows_or_heads(stub: StubKernel) -> None:
    out, lse = run(half(0, HQ, D), half(KV, HK, D), half(KV, HK, 32), return_lse=True)
    assert out.shape == (0, HQ, 32)
    assert lse.shape == (0, HQ)
    out, lse = run(half(QO, 0, D), half(KV, HK, D), half(KV, HK, 32), return_lse=True)
    assert out.shape == (QO, 0, 32)
    out, lse = run(half(QO, 0, D), half(KV, 0, D), half(KV, 0, 32), return_lse=True)
    assert lse.shape == (QO, 0)
    assert stub.calls == []


def test_forced_backend_is_the_one_called(stub: StubKernel) -> None:
    q = half(QO, HQ, D)
    for backend in ("fa2", "fa3"):
        run(q, q, q, backend=backend)
    run(q, q, q, backend="reference")
    assert [c["backend"] for c in stub.calls] == ["fa2", "fa3"]


def test_parameters_of_a_module(stub: StubKernel) -> None:
    q = torch.nn.Parameter(half(QO, HQ, D))
    with torch.no_grad():
        check(run(q, q, q), q, q, q)
    assert len(stub.calls) == 1


@pytest.mark.parametrize("num_splits", [0, 1, 5, 256])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_number_of_splits_reaches_the_op(stub: StubKernel, backend: str, num_splits: int) -> None:
    q, kv = half(QO, HQ, D), half(KV, HK, D)
    call = make_request(q, kv, kv, causal=True, return_lse=True)
    check(ops.run(backend, call, num_splits=num_splits), q, kv, kv, causal=True, return_lse=True)
    assert only_call(stub)["num_splits"] == num_splits


def test_a_call_leaves_the_number_of_splits_to_the_rule(stub: StubKernel) -> None:
    q, kv = half(QO, HQ, D), half(KV, HK, D)
    run(q, kv, kv)
    assert only_call(stub)["num_splits"] == 0
    with pytest.raises(TypeError, match="num_splits"):
        run(q, kv, kv, num_splits=2)
