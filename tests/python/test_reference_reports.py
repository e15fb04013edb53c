"""What went wrong for users of kernels like this one: the reference gets it right, exactly.

`user_reports` has the same kinds for every backend, with the tolerance of kernels; here the naive
rule and the reference must agree. The numbers in the names are the reports' (FI = flashinfer, FA =
flash-attention, PT = pytorch, VL = vllm, XF = xformers).
"""

import math

import pytest
import torch

import prefill
from naive import assert_exact, make_qkv, naive_attention, reference
from prefill import reference as module
from prefill.packing import packbits
from prefill.rope import alibi_slopes


def call(q, k, v, **arguments):
    return prefill.single_prefill_with_kv_cache(q, k, v, backend="reference", **arguments)


class TestEmptyRowsAndExtremeLogits:
    def test_fi4452_causal_with_more_queries_than_keys(self):
        q, k, v = make_qkv(34, 1, (32, 32), 128, torch.bfloat16)
        out, lse = call(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out[:33], torch.zeros(33, 32, 128, dtype=torch.bfloat16))
        assert torch.equal(lse[:33], torch.full((33, 32), -torch.inf))
        assert torch.equal(out[33], v[0])
        assert lse[33].isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("causal", [False, True])
    def test_fi4267_all_logits_far_below_a_sentinel(self, dtype, causal):
        q, k, v = make_qkv(64, 64, (4, 2), 64, dtype)
        q[..., 0], k[..., 0] = 250.0, -240.0
        out, lse = assert_exact(q, k, v, sm_scale=1.0, causal=causal)
        assert (lse < -50_000).all()
        assert out.any(-1).all()

    def test_logits_of_minus_1e30_win_over_masked_ones(self):
        q, k, v = make_qkv(8, 8, (2, 1), 8)
        q[..., :], k[..., :] = 1.0, -1.0
        out, lse = call(q, k, v, sm_scale=1e30 / 8, causal=True, return_lse=True)
        rows = torch.arange(1, 9)[:, None, None]
        expected = v.double().cumsum(0) / rows
        torch.testing.assert_close(out.double(), expected.expand(8, 2, 8), rtol=1e-3, atol=1e-4)
        assert (lse < -1e30).all()
        assert lse.isfinite().all()

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("sinks", [None, torch.linspace(-3, 3, 8)])
    def test_fi353_fa1343_no_keys_at_all(self, layout, sinks):
        q, k, v = make_qkv(4, 0, (8, 2), 128)
        if layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        out, lse = call(q, k, v, kv_layout=layout, sinks=sinks, return_lse=True)
        assert torch.equal(out, torch.zeros(4, 8, 128, dtype=torch.float16))
        expected = torch.full((8,), -torch.inf) if sinks is None else sinks / math.log(2)
        torch.testing.assert_close(lse, expected.expand(4, 8))

    def test_rows_of_a_mask_that_keep_nothing(self):
        q, k, v = make_qkv(9, 21, (4, 2), 16)
        keep = torch.rand(9, 21) < 0.5
        keep[[0, 4, 8]] = False
        for mask in ({"custom_mask": keep}, {"packed_custom_mask": packbits(keep, "little")}):
            out, lse = assert_exact(q, k, v, **mask)
            assert not out[[0, 4, 8]].any()
            assert (lse[[0, 4, 8]] == -torch.inf).all()

    def test_fa_74dfa43_one_long_kv_head(self):
        q, k, v = make_qkv(2, 65_537, (1, 1), 128)
        out, _ = call(q, k, v, causal=True, return_lse=True)
        logits = q[:, 0].double() @ k[:, 0].double().T / math.sqrt(128)
        logits[0, -1] = -torch.inf
        expected = logits.softmax(-1) @ v[:, 0].double()
        torch.testing.assert_close(out[:, 0].double(), expected, rtol=1e-3, atol=1e-7)

    def test_fi2113_the_base_of_the_lse(self):
        q, k, v = make_qkv(5, 33, (4, 2), 64)
        logits = torch.einsum("ihd,jhd->ihj", q.double(), k.double().repeat_interleave(2, 1)) / 8
        natural = logits.logsumexp(-1).float()
        _, base_2 = call(q, k, v, return_lse=True)
        _, base_e = call(q, k, v, return_lse=True, lse_base="e")
        torch.testing.assert_close(base_e, natural, rtol=2e-7, atol=1e-6)
        torch.testing.assert_close(base_2, natural / math.log(2), rtol=2e-7, atol=1e-6)

    def test_fi4485_auto_gives_the_same_unit(self):
        q, k, v = make_qkv(5, 33, (4, 2), 64)
        auto = prefill.single_prefill_with_kv_cache_return_lse(q, k, v)
        forced = call(q, k, v, return_lse=True)
        assert torch.equal(auto[1], forced[1])

    def test_fa1930_a_single_key_kept_wherever_it_is(self):
        kv_len = 4096
        q, k, v = make_qkv(kv_len, kv_len, (1, 1), 8)
        keep = torch.eye(kv_len, dtype=torch.bool)  # row c keeps key c alone
        out, lse = call(q, k, v, custom_mask=keep, return_lse=True)
        assert torch.equal(out, v)
        dots = (q.double() * k.double()).sum(-1) / math.sqrt(8) / math.log(2)
        torch.testing.assert_close(lse, dots.float(), rtol=2e-7, atol=1e-6)


class TestWindowAndSoftCap:
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_fi3578_fp8_with_a_window_past_256(self, dtype):
        q, k, v = (x.to(dtype) for x in make_qkv(257, 257, (64, 8), 128))
        window, _ = reference(q, k, v, causal=True, window_left=511)
        causal, _ = reference(q, k, v, causal=True)
        assert window.dtype == torch.bfloat16
        assert torch.equal(window, causal)

    @pytest.mark.parametrize("causal", [False, True])
    def test_fi714_work_of_a_window_does_not_grow_with_the_keys(self, causal, monkeypatch):
        touched = []
        original = module._attend

        def counting(q, k, *rest):
            touched.append(q.shape[0] * k.shape[0] * q.shape[1] * q.shape[2])
            return original(q, k, *rest)

        monkeypatch.setattr(module, "_attend", counting)
        work = []
        for kv_len in (1024, 65_536):
            q, k, v = make_qkv(128, kv_len, (32, 4), 8)
            touched.clear()
            call(q, k, v, causal=causal, window_left=256)
            work.append(sum(touched))
        assert work[0] == work[1] == 128 * (128 + 256) * 32

    def test_transformers39408_the_window_includes_its_edge(self):
        q, k, v = make_qkv(8, 8, (1, 1), 8)
        v[:] = torch.eye(8, dtype=v.dtype)[:, None]
        out, _ = reference(q, k, v, causal=True, window_left=2)
        assert out[5, 0].nonzero().flatten().tolist() == [3, 4, 5]
        own, _ = reference(q, k, v, causal=True, window_left=0)
        assert torch.equal(own, v)

    def test_fi1193_soft_cap_of_large_logits(self):
        q, k, v = make_qkv(16, 80, (4, 2), 32)
        q *= 12
        capped, _ = assert_exact(q, k, v, logits_soft_cap=30.0)
        uncapped, _ = assert_exact(q, k, v)
        assert (capped - uncapped).abs().max() > 0.05

    @pytest.mark.parametrize("cap", [1.0, 0.01])
    def test_the_mask_comes_after_the_cap(self, cap):
        q, k, v = make_qkv(130, 130, (2, 1), 16)
        out, _ = assert_exact(q, k, v, causal=True, logits_soft_cap=cap)
        assert torch.equal(out[0], v[0].expand(2, 16))


class TestMasks:
    @pytest.mark.parametrize("shape", [(10, 15), (9, 20), (20, 10), (10, 21)])
    def test_fi3176_a_mask_of_the_wrong_shape(self, shape):
        q, k, v = make_qkv(10, 20, (8, 4), 128)
        with pytest.raises(ValueError, match="custom_mask") as error:
            call(q, k, v, custom_mask=torch.ones(shape, dtype=torch.bool))
        for size in (*shape, 10, 20):
            assert str(size) in str(error.value)

    @pytest.mark.parametrize("kv_len", [1, 7, 43, 64, 65])
    def test_xf813_rows_of_any_number_of_bits(self, kv_len):
        q, k, v = make_qkv(11, kv_len, (4, 2), 16)
        keep = torch.rand(11, kv_len) < 0.6
        plain, _ = assert_exact(q, k, v, custom_mask=keep)
        packed, _ = assert_exact(q, k, v, packed_custom_mask=packbits(keep, "little"))
        assert torch.equal(plain, packed)

    def test_fi1489_a_mask_takes_the_place_of_causal(self):
        q, k, v = make_qkv(16, 16, (2, 2), 16)
        full = call(q, k, v)
        with pytest.warns(UserWarning, match="causal"):
            both = call(q, k, v, causal=True, custom_mask=torch.ones(16, 16, dtype=torch.bool))
        assert torch.equal(both, full)

    def test_fi1028_a_mask_does_not_stay(self):
        q, k, v = make_qkv(16, 16, (2, 2), 16)
        before = call(q, k, v, causal=True)
        call(q, k, v, custom_mask=torch.rand(16, 16) < 0.5)
        assert torch.equal(call(q, k, v, causal=True), before)

    def test_a_mask_of_the_causal_triangle_is_causal(self):
        """The example of the function's documentation, smaller."""
        q, k, v = make_qkv(16, 50, (8, 2), 32)
        mask = torch.tril(torch.full((16, 50), True), diagonal=50 - 16)
        assert torch.equal(call(q, k, v, custom_mask=mask), call(q, k, v, causal=True))


class TestTails:
    @pytest.mark.parametrize("stray", [torch.nan, torch.inf])
    def test_fi941_fa1745_memory_past_the_keys_is_not_read(self, stray):
        q, k, v = make_qkv(3, 300, (4, 2), 16)
        for kv_len in (*range(1, 66), 127, 128, 129, 255, 256, 257):
            clean = call(q, k[:kv_len], v[:kv_len], causal=True)
            cache_k, cache_v = k.clone(), v.clone()
            cache_k[kv_len:], cache_v[kv_len:] = stray, stray
            dirty = call(q, cache_k[:kv_len], cache_v[:kv_len], causal=True)
            assert torch.equal(dirty, clean)

    @pytest.mark.parametrize("tile", [64, 96, 128, 176, 192])
    def test_lengths_around_the_tiles_of_kernels(self, tile):
        for kv_len in (tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 1):
            q, k, v = make_qkv(2, kv_len, (2, 1), 16, seed=kv_len)
            assert_exact(q, k, v, causal=True)


class TestScales:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
    @pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
    def test_vl51363_each_scale_alone_counts(self, dtype, name):
        q, k, v = (x.to(dtype) for x in make_qkv(7, 19, (6, 3), 16))
        scale = torch.linspace(0.5, 2.5, 6 if name == "scale_q" else 3)
        scaled, _ = assert_exact(q, k, v, **{name: scale})
        plain, _ = reference(q, k, v)
        heads = scaled.float().sub(plain.float()).abs().amax((0, 2))
        assert (heads > 0).all()

    def test_scales_of_the_wrong_kind(self):
        q, k, v = make_qkv(7, 19, (6, 3), 16)
        with pytest.raises(ValueError, match="scale_k"):
            call(q, k, v, scale_k=torch.ones(6))
        with pytest.raises(TypeError, match="scale_q"):
            call(q, k, v, scale_q=torch.ones(6, dtype=torch.float64))
        with pytest.raises(ValueError, match="scale_v"):
            call(q, k, v, scale_v=torch.ones(3, device="meta"))

    def test_fi4976_fp8_kv_of_unequal_head_dims(self):
        q, k, v = make_qkv(9, 19, (4, 4), (192, 128))
        assert_exact(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), causal=True)


class TestPositions:
    @pytest.mark.parametrize("heads", [12, 40, 66])
    def test_fi200_slopes_of_any_number_of_heads(self, heads):
        q, k, v = make_qkv(3, 9, (heads, heads), 8)
        by_rule = assert_exact(q, k, v, pos_encoding_mode="ALIBI", causal=True)
        given = reference(
            q, k, v, pos_encoding_mode="ALIBI", causal=True, alibi_slopes=alibi_slopes(heads)
        )
        assert torch.equal(by_rule[0], given[0])
        assert torch.equal(by_rule[1], given[1])

    def test_fi1606_a_rank_gives_its_own_slopes(self):
        q, k, v = make_qkv(5, 12, (16, 16), 8)
        slopes = alibi_slopes(16)
        whole = call(q, k, v, pos_encoding_mode="ALIBI")
        for rank in (slice(0, 8), slice(8, 16)):
            part = call(
                q[:, rank],
                k[:, rank],
                v[:, rank],
                pos_encoding_mode="ALIBI",
                alibi_slopes=slopes[rank],
            )
            assert torch.equal(part, whole[:, rank])

    def test_fi746_rope_scale_divides_positions(self):
        q, k, v = make_qkv(6, 10, (2, 1), 16)
        out, _ = assert_exact(q, k, v, pos_encoding_mode="ROPE_LLAMA", rope_scale=8.0)
        plain, _ = reference(q, k, v, pos_encoding_mode="ROPE_LLAMA")
        assert not torch.equal(out, plain)

    def test_rope_of_more_queries_than_keys_has_negative_positions(self):
        q, k, v = make_qkv(12, 4, (2, 1), 16)
        assert_exact(q, k, v, pos_encoding_mode="ROPE_LLAMA")

    def test_fi1413_a_mode_that_is_no_string(self):
        q, k, v = make_qkv(2, 2, (1, 1), 8)
        with pytest.raises((TypeError, ValueError), match="pos_encoding_mode"):
            call(q, k, v, pos_encoding_mode=0)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 11, 12, 16])
def test_fi1148_group_ratios_on_the_diagonal(group):
    for length in (1, 7, 33):
        q, k, v = make_qkv(length, length, (2 * group, 2), 8, seed=group)
        assert_exact(q, k, v, causal=True)


@pytest.mark.parametrize("kv_heads", range(1, 9))
def test_pt193893_few_kv_heads(kv_heads):
    q, k, v = make_qkv(5, 11, (2 * kv_heads, kv_heads), 8, seed=kv_heads)
    assert_exact(q, k, v)


def test_the_naive_rule_itself_on_two_keys():
    """A case small enough to compute by hand: logits 0 and ln 3, values 1 and 5."""
    q = torch.tensor([[[1.0] + [0.0] * 7]])
    k = torch.tensor([[[0.0] * 8], [[math.log(3)] + [0.0] * 7]])
    v = torch.tensor([[[1.0] * 8], [[5.0] * 8]])
    out, lse = naive_attention(q, k, v, sm_scale=1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 8), 4.0, dtype=torch.float64))
    assert lse.item() == pytest.approx(2.0)
