"""packbits and segment_packbits against numpy, and the bit offsets of masks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prefill
from prefill import packing
from prefill.packing import mask_bit_offset, packbits, segment_packbits, unpack_mask_block

short = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
orders = st.sampled_from(["big", "little"])


class TestPackbits:
    @short
    @given(st.lists(st.integers(0, 1), max_size=70), orders, st.integers(1, 5))
    def test_as_numpy(self, bits, order, block):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "_BLOCK_BYTES", block)
            packed = packbits(torch.tensor(bits, dtype=torch.bool), order)
        expected = np.packbits(np.array(bits, dtype=bool), bitorder=order)
        assert packed.dtype == torch.uint8
        assert packed.tolist() == expected.tolist()

    @pytest.mark.parametrize("order", ["big", "little"])
    def test_any_shape_and_strides_in_row_major_order(self, order):
        x = (torch.rand(7, 5, 3) < 0.5).permute(2, 0, 1)[:, ::2]
        expected = np.packbits(x.numpy(), bitorder=order)
        assert packbits(x, order).tolist() == expected.tolist()

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
    def test_nonzero_counts_as_one(self, dtype):
        x = torch.tensor([0, 2, 1, 0, 127, 0, 0, 64, 4], dtype=dtype)
        assert packbits(x).tolist() == np.packbits(x.numpy()).tolist()

    def test_default_is_big_and_public(self):
        x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
        assert prefill.packbits(x).tolist() == [0b10110011]
        assert prefill.packbits(x, bitorder="little").tolist() == [0b11001101]

    def test_errors(self):
        bits = torch.zeros(3, dtype=torch.bool)
        with pytest.raises(ValueError, match="'big' or 'little', got 'middle'; pass 'little'"):
            packbits(bits, "middle")
        with pytest.raises(TypeError, match=r"bool or integer, got torch\.float32"):
            packbits(torch.zeros(3))
        with pytest.raises(TypeError, match=r"got list; convert it with torch\.as_tensor"):
            packbits([1, 0])

    def test_traces_whole(self):
        x = torch.rand(5, 11) < 0.5
        compiled = torch.compile(packbits, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, "little"), packbits(x, "little"))


class TestSegmentPackbits:
    @short
    @given(
        st.lists(st.integers(0, 20), max_size=6),
        orders,
        st.sampled_from([torch.int32, torch.int64]),
        st.integers(8, 24),
    )
    def test_each_segment_as_numpy(self, lengths, order, dtype, block):
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        x = torch.rand(bounds[-1], generator=torch.Generator().manual_seed(len(lengths))) < 0.5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "_BLOCK_BYTES", block)
            packed, new_bounds = segment_packbits(x, torch.tensor(bounds, dtype=dtype), order)
        parts = [
            np.packbits(x[a:b].numpy(), bitorder=order).tolist()
            for a, b in itertools.pairwise(bounds)
        ]
        assert packed.dtype == torch.uint8
        assert packed.tolist() == list(itertools.chain(*parts))
        assert new_bounds.dtype == dtype
        assert new_bounds.tolist() == [
            sum(len(p) for p in parts[:i]) for i in range(len(parts) + 1)
        ]

    def test_documented_example(self):
        x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
        packed, bounds = prefill.segment_packbits(x, torch.tensor([0, 4, 7, 11]))
        assert packed.tolist() == [0b10110000, 0b00100000, 0b11010000]
        assert bounds.tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("bounds", "text"),
        [
            ([1, 5], "first 1, last 5"),
            ([0, 4], "elements, 5; got first 0, last 4"),
            ([0, 6], "last 6"),
            ([0, 3, 2, 5], "smallest step -1; make it of the segments' lengths"),
        ],
    )
    def test_wrong_indptr(self, bounds, text):
        with pytest.raises(ValueError, match=text):
            segment_packbits(torch.ones(5, dtype=torch.bool), torch.tensor(bounds))

    def test_errors(self):
        bits = torch.ones(4, dtype=torch.bool)
        with pytest.raises(TypeError, match=r"int32 or int64 tensor, got torch\.float32"):
            segment_packbits(bits, torch.tensor([0.0, 4.0]))
        with pytest.raises(TypeError, match="int32 or int64 tensor, got list; make it with"):
            segment_packbits(bits, [0, 4])
        with pytest.raises(ValueError, match=r"x must be 1-D, got shape \(2, 2\)"):
            segment_packbits(bits.view(2, 2), torch.tensor([0, 4]))
        with pytest.raises(
            ValueError, match=r"indptr must be 1-D.*got shape \(0,\); for no segments"
        ):
            segment_packbits(bits, torch.empty(0, dtype=torch.int64))


class TestMaskBits:
    @pytest.mark.parametrize("kv_len", [1, 7, 8, 43, 64])
    def test_blocks_of_a_packed_mask(self, kv_len):
        mask = torch.rand(13, kv_len) < 0.5
        packed = packbits(mask, "little")
        for rows in ((0, 13), (3, 4), (12, 13)):
            for keys in ((0, kv_len), (kv_len // 2, kv_len), (kv_len, kv_len)):
                block = unpack_mask_block(packed, rows, keys, kv_len)
                assert block.dtype == torch.bool
                assert torch.equal(block, mask[slice(*rows), slice(*keys)])

    @pytest.mark.parametrize("length", [46_341, 49_999, 1 << 20, (1 << 30) - 1])
    def test_offsets_beyond_32_bits(self, length):
        row = torch.tensor([length - 1, length - 2])
        key = torch.tensor([length - 1, 0])
        byte, bit = mask_bit_offset(row, key, length)
        for index, (i, j) in enumerate(zip(row.tolist(), key.tolist(), strict=True)):
            assert (byte[index].item(), bit[index].item()) == divmod(i * length + j, 8)

    @pytest.mark.parametrize("length", [46_341, 49_999, 70_000])
    def test_last_rows_of_a_mask_of_over_2_to_the_31_bits(self, length, tmp_path):
        """The mask lies in a sparse file: of its 268 MB and more only the last pages exist."""
        size = (length * length + 7) // 8
        packed = np.memmap(tmp_path / "mask", dtype=np.uint8, mode="w+", shape=(size,))
        kept = [0, 5, length // 2, length - 1]
        for key in kept:
            byte, bit = divmod((length - 1) * length + key, 8)
            packed[byte] |= 1 << bit
        block = unpack_mask_block(
            torch.from_numpy(packed), (length - 2, length), (0, length), length
        )
        assert not block[0].any()
        assert block[1].nonzero().flatten().tolist() == kept
