"""The reference backend against the naive spec, torch's SDPA, and its own promises."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import prefill
from naive import assert_exact, make_qkv, reference
from prefill import reference as module
from prefill.packing import packbits
from prefill.request import make_request

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="a CPU build of torch cannot index CUDA tensors"
)

DTYPES = [
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e5m2, torch.float8_e4m3fn),
]


@st.composite
def calls(draw):
    """Draw (q, k, v, arguments) over every argument of the function."""
    qo_len, kv_len = draw(st.integers(0, 9)), draw(st.integers(0, 17))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = (num_kv_heads * group, num_kv_heads)
    head_dim = draw(st.sampled_from([(8, 8), (16, 8), (24, 40)]))
    q_dtype, kv_dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 999))
    q, k, v = make_qkv(qo_len, kv_len, heads, head_dim, torch.float32, seed, 2.0)
    q, k, v = q.to(q_dtype), k.to(kv_dtype), v.to(kv_dtype)
    generator = torch.Generator().manual_seed(seed)

    def per_head(count):
        return torch.rand(count, generator=generator) * 1.5 + 0.25

    arguments = {
        "window_left": draw(st.sampled_from([-1, -7, 0, 1, 3, 100])),
        "logits_soft_cap": draw(st.sampled_from([None, 0.0, -1.0, 0.5, 30.0])),
        "sm_scale": draw(st.sampled_from([None, 0.0, -0.3, 2.0])),
        "lse_base": draw(st.sampled_from(["2", "e"])),
        "o_dtype": draw(st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32])),
    }
    mask = draw(st.sampled_from(["none", "causal", "custom", "packed"]))
    keep = torch.rand(qo_len, kv_len, generator=generator) < draw(st.sampled_from([0.1, 0.7]))
    if mask == "causal":
        arguments["causal"] = True
    elif mask == "custom":
        arguments["custom_mask"] = keep
    elif mask == "packed":
        packed = packbits(keep, bitorder="little")
        if packed.numel() and qo_len * kv_len % 8:
            packed[-1] |= 0x80  # a bit past the end
        arguments["packed_custom_mask"] = packed
        arguments["custom_mask"] = ~keep  # has no say
    mode = draw(st.sampled_from(["NONE", "ROPE_LLAMA", "ALIBI"]))
    arguments["pos_encoding_mode"] = mode
    if mode == "ROPE_LLAMA":
        arguments["rope_scale"] = draw(st.sampled_from([1.0, 8.0]))
        arguments["rope_theta"] = draw(st.sampled_from([1e4, 5e5]))
    if mode == "ALIBI" and draw(st.booleans()):
        arguments["alibi_slopes"] = per_head(heads[0])
    if draw(st.booleans()):
        arguments["sinks"] = per_head(heads[0]) * 4 - 3
    for name, count in (("scale_q", heads[0]), ("scale_k", heads[1]), ("scale_v", heads[1])):
        kind = draw(st.sampled_from(["none", "float", "one", "heads"]))
        if kind == "float":
            arguments[name] = 0.75
        elif kind != "none":
            arguments[name] = per_head(1 if kind == "one" else count)
    for name in ("k_scale", "v_scale"):
        if draw(st.booleans()):
            arguments[name] = 1.25
    if draw(st.booleans()):
        arguments["kv_layout"] = "HND"
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return q, k, v, arguments


@settings(
    max_examples=250,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(calls(), st.sampled_from([(1 << 23, 512, 1 << 16), (300, 4, 5), (64, 2, 3), (1, 1, 1)]))
def test_every_argument_in_every_combination_is_exact(call, blocks):
    q, k, v, arguments = call
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(
            ("_BLOCK_ELEMENTS", "_BOUNDED_ROWS", "_BLOCK_KEYS"), blocks, strict=True
        ):
            patch.setattr(module, name, size)
        assert_exact(q, k, v, **arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 8), (28, 4), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, (192, 128), 72])
def test_agrees_with_sdpa(dtype, heads, head_dim):
    q, k, v = make_qkv(65, 130, heads, head_dim, dtype)
    keep = torch.rand(65, 130) < 0.6
    causal = torch.ones(65, 130, dtype=torch.bool).tril(130 - 65)
    for arguments, mask in (({}, None), ({"causal": True}, causal), ({"custom_mask": keep}, keep)):
        out, _ = reference(q, k, v, o_dtype=torch.float32, **arguments)
        wide = (x.double().transpose(0, 1)[None] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *wide, attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(out.double(), expected[0].transpose(0, 1), rtol=1e-6, atol=1e-7)


def test_window_agrees_with_sdpa_over_many_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1 << 14)
    q, k, v = make_qkv(700, 900, (4, 2), 64)
    distance = torch.arange(900)[None, :] - (torch.arange(700) + 200)[:, None]
    for causal in (False, True):
        keep = distance >= -77
        if causal:
            keep &= distance <= 0
        out, _ = reference(q, k, v, causal=causal, window_left=77, o_dtype=torch.float32)
        wide = (x.double().transpose(0, 1)[None] for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *wide, attn_mask=keep, enable_gqa=True
        )
        torch.testing.assert_close(out.double(), expected[0].transpose(0, 1), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("window_left", [0, 3])
def test_window_and_mask_must_both_hold(window_left):
    q, k, v = make_qkv(9, 20, (2, 1), 8)
    keep = torch.ones(9, 20, dtype=torch.bool).tril(11)
    keep[:, ::3] = False
    for mask in ({"custom_mask": keep}, {"packed_custom_mask": packbits(keep, "little")}):
        out, _ = assert_exact(q, k, v, window_left=window_left, **mask)
        unbounded, _ = reference(q, k, v, **mask)
        assert not torch.equal(out, unbounded)


@pytest.mark.parametrize("sm_scale", [1e30, -1e30])
def test_equal_products_are_equal_logits_at_any_scale(sm_scale):
    """Two keys whose products with q are alike and exact, summed in another order."""
    q, k, v = ((4 * x).round() / 4 for x in make_qkv(16, 2, (4, 2), 64))
    q[..., 32:] = q[..., :32]
    k[1] = k[0].roll(32, -1)
    v[0], v[1] = 0.0, 1.0
    out, _ = reference(q, k, v, sm_scale=sm_scale)
    torch.testing.assert_close(out, torch.full_like(out, 0.5), rtol=0, atol=0)


class TestRanges:
    """visible_keys and range_mask against the definition, brute force."""

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("window_left", [-1, 0, 1, 4, 50])
    def test_against_the_definition(self, causal, window_left):
        def sees(row, key, offset):
            position = row + offset
            return (not causal or key <= position) and (
                window_left < 0 or key >= position - window_left
            )

        for qo_len in (1, 3, 8):
            for kv_len in (0, 1, 5, 11):
                offset = kv_len - qo_len
                for start in range(qo_len):
                    for stop in range(start + 1, qo_len + 1):
                        rows = module.Span(start, stop)
                        keys = module.visible_keys(rows, kv_len, offset, causal, window_left)
                        expected = torch.tensor(
                            [
                                [sees(i, j, offset) for j in range(kv_len)]
                                for i in range(start, stop)
                            ],
                            dtype=torch.bool,
                        ).view(stop - start, kv_len)
                        seen = expected.any(0).nonzero().flatten().tolist()
                        assert list(range(*keys)) == seen
                        mask = module.range_mask(
                            rows, keys, offset, causal, window_left, torch.device("cpu")
                        )
                        part = expected[:, keys.as_slice]
                        if mask is None:
                            assert part.all()
                        else:
                            assert torch.equal(mask, part)
                            assert part.numel() == 0 or not part.all()

    def test_blocks_of_heads_cover_each_head_once(self):
        for kv_heads, group, rows, keys in [(1, 1, 1, 1), (8, 4, 512, 4096), (2, 64, 1, 1 << 20)]:
            seen = torch.zeros(kv_heads, group, dtype=torch.int32)
            for kv_block, members in module._head_blocks(kv_heads, group, rows, keys, 128):
                seen[kv_block.as_slice, members.as_slice] += 1
                logits = kv_block.size * members.size * rows * keys
                assert logits <= module._BLOCK_ELEMENTS
            assert (seen == 1).all()


class TestResults:
    def test_out_and_lse_are_filled(self):
        q, k, v = make_qkv(5, 9, (4, 2), (16, 8))
        out = torch.full((4, 5, 16), torch.nan, dtype=q.dtype).transpose(0, 1)[..., ::2]
        lse = torch.full((4, 5), torch.nan).t()
        given = prefill.single_prefill_with_kv_cache(
            q, k, v, backend="reference", return_lse=True, out=out, lse=lse
        )
        expected = reference(q, k, v)
        assert given[0] is out
        assert given[1] is lse
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])

    def test_no_lse_unless_asked(self):
        q, k, v = make_qkv(2, 3, (1, 1), 8)
        out, lse = module.reference_attention(make_request(q, k, v))
        assert lse is None
        assert out.is_contiguous()
        assert torch.equal(out, reference(q, k, v)[0])

    @pytest.mark.parametrize("heads", [(0, 0), (0, 2)])
    def test_no_heads(self, heads):
        q, k, v = make_qkv(4, 6, heads, 8)
        out, lse = reference(q, k, v)
        assert out.shape == (4, 0, 8)
        assert lse.shape == (4, 0)

    def test_inputs_stay_as_they_are(self):
        tensors = make_qkv(8, 16, (4, 2), 16)
        copies = [x.clone() for x in tensors]
        mask = torch.rand(8, 16) < 0.5
        kept = mask.clone()
        sinks = torch.zeros(4)
        reference(*tensors, custom_mask=mask, sinks=sinks, pos_encoding_mode="ROPE_LLAMA")
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
        assert torch.equal(mask, kept)
        assert torch.equal(sinks, torch.zeros(4))

    def test_same_bits_again_whatever_the_matmul_precision(self):
        q, k, v = make_qkv(100, 300, (4, 2), 64)
        first = reference(q, k, v, causal=True)
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            again = reference(q, k, v, causal=True)
        finally:
            torch.set_float32_matmul_precision(before)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


class TestStrayValues:
    """NaN and infinities, masked and visible."""

    MASKS = ("causal", "window", "custom", "packed")

    def arguments(self, kind, qo_len, kv_len):
        causal = torch.ones(qo_len, kv_len, dtype=torch.bool).tril(kv_len - qo_len)
        return {
            "causal": {"causal": True},
            "window": {"causal": True, "window_left": kv_len},
            "custom": {"custom_mask": causal},
            "packed": {"packed_custom_mask": packbits(causal, bitorder="little")},
        }[kind]

    @pytest.mark.parametrize("kind", MASKS)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_masked_keys_leave_no_trace(self, kind, value):
        q, k, v = make_qkv(20, 20, (4, 2), 16)
        arguments = self.arguments(kind, 20, 20)
        clean = reference(q, k, v, **arguments)
        k[13:], v[13:] = value, value
        dirty = reference(q, k, v, **arguments)
        assert torch.equal(clean[0][:13], dirty[0][:13])
        assert torch.equal(clean[1][:13], dirty[1][:13])

    @pytest.mark.parametrize("kind", MASKS)
    def test_visible_values_reach_their_channel_of_the_rows_that_see_them(self, kind):
        q, k, v = make_qkv(20, 20, (4, 2), 16)
        arguments = self.arguments(kind, 20, 20)
        clean, _ = reference(q, k, v, **arguments)
        v[3, 0, 5], v[7, 0, 5] = torch.inf, -torch.inf
        v[4, 1, 6], v[9, 1, 7] = torch.nan, -torch.inf
        dirty, _ = reference(q, k, v, **arguments)
        expected = clean.clone()
        expected[3:, :2, 5] = torch.inf
        expected[7:, :2, 5] = torch.nan
        expected[4:, 2:, 6] = torch.nan
        expected[9:, 2:, 7] = -torch.inf
        assert torch.equal(dirty.nan_to_num(99.0), expected.nan_to_num(99.0))

    def test_without_a_mask_every_row_sees_them(self):
        q, k, v = make_qkv(6, 6, (2, 2), 8)
        v[2, 0, 1], v[3, 1, 2] = -torch.inf, torch.nan
        out, _ = reference(q, k, v)
        assert (out[:, 0, 1] == -torch.inf).all()
        assert out[:, 1, 2].isnan().all()
        assert out.isfinite().sum() == out.numel() - 12

    def test_visible_nan_in_k_marks_the_rows_that_see_it(self):
        q, k, v = make_qkv(20, 20, (4, 2), 16)
        clean = reference(q, k, v, causal=True)
        k[11, 1, 0] = torch.nan
        out, lse = reference(q, k, v, causal=True)
        assert out[11:, 2:].isnan().all()
        assert lse[11:, 2:].isnan().all()
        assert torch.equal(out[:, :2], clean[0][:, :2])
        assert torch.equal(out[:11], clean[0][:11])

    def test_empty_rows_stay_zero_under_odd_scales(self):
        q, k, v = make_qkv(6, 3, (2, 1), 8)
        out, lse = reference(q, k, v, causal=True, scale_v=torch.tensor([-torch.inf]))
        assert torch.equal(out[:3], torch.zeros(3, 2, 8, dtype=q.dtype))
        assert not out[:3].signbit().any()
        assert (lse[:3] == -torch.inf).all()


class TestCompile:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"causal": True, "window_left": 20, "logits_soft_cap": 5.0},
            {"pos_encoding_mode": "ROPE_LLAMA", "lse_base": "e"},
            {"pos_encoding_mode": "ALIBI", "sinks": torch.tensor([0.5, 1.0, -2.0, 0.0])},
            {"packed_custom_mask": packbits(torch.ones(40, 50).tril() != 0, "little")},
            {"scale_q": torch.rand(4), "scale_k": torch.rand(2), "scale_v": torch.rand(2)},
        ],
    )
    def test_traces_whole(self, monkeypatch, arguments):
        monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 4096)  # several blocks
        q, k, v = make_qkv(40, 50, (4, 2), 16)

        def call(q, k, v, **tensors):
            return reference(q, k, v, **arguments, **tensors)

        compiled = torch.compile(call, backend="eager", fullgraph=True)
        for ours, expected in zip(compiled(q, k, v), call(q, k, v), strict=True):
            assert torch.equal(ours, expected)

    @pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=needs_cuda_build)])
    @pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
    def test_stays_on_its_device_and_reads_no_value(self, device, mode, dtype):
        """Fake tensors have no values, and refuse to mix devices; no GPU is needed for them."""
        with FakeTensorMode():
            q = torch.empty(40, 4, 16, dtype=dtype, device=device)
            k, v = torch.empty(2, 50, 2, 16, dtype=dtype, device=device).unbind()
            heads = torch.ones(4, device=device)
            bits = torch.zeros(40 * 50 // 8, dtype=torch.uint8, device=device)
            arguments = {"pos_encoding_mode": mode, "sinks": heads, "scale_q": heads}
            for mask in ({"causal": True, "window_left": 7}, {"packed_custom_mask": bits}):
                out, lse = reference(q, k, v, **arguments, **mask)
                assert (out.shape, out.device) == ((40, 4, 16), q.device)
                assert (lse.shape, lse.device) == ((40, 4), q.device)
