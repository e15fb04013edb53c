"""What went wrong for users of kernels like this one, restated: one check per kind of fault.

Each takes a `Run`, so that the reference, the kernels and, without a GPU, the path to them with a
stand-in for the kernels meet the same checks. The numbers in the names are the reports' (fi =
flashinfer, fa = flash-attention, pt = pytorch, vl = vllm, sg = sglang, xf = xformers). Streams,
graphs, threads and devices are in `gpu/test_execution.py` and `soak.py`, sizes beyond 32 bits in
`big.py`, smaller GPUs in `test_backends.py`.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import prefill
from cases import E4M3, E5M2, per_head, random_mask
from exactness import LOG2_E, Ledger, expect, normal
from float8_scheme import is_native
from layouts import COPIED, IN_PLACE, amid_nan, relaid
from prefill import packbits
from split_cases import split_attention

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """A backend, and where it runs."""

    backend: str
    device: str

    @property
    def is_small(self) -> bool:
        """Whether sizes must be such that the CPU does them."""
        return self.device == "cpu"

    def inputs(
        self,
        qo_len: int,
        kv_len: int,
        heads: tuple[int, int] = (4, 2),
        dims: int | tuple[int, int] = 64,
        dtype: torch.dtype = FLOAT16,
    ) -> Inputs:
        dim_qk, dim_vo = (dims, dims) if isinstance(dims, int) else dims
        return (
            normal(qo_len, heads[0], dim_qk, dtype=dtype, device=self.device),
            normal(kv_len, heads[1], dim_qk, dtype=dtype, seed=1, device=self.device),
            normal(kv_len, heads[1], dim_vo, dtype=dtype, seed=2, device=self.device),
        )

    def __call__(self, *tensors: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        chosen = {"backend": self.backend, "return_lse": True} | arguments
        result: tuple[Tensor, Tensor] = prefill.single_prefill_with_kv_cache(*tensors, **chosen)
        return result

    def right(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """The result, which float64 confirms."""
        out, lse = self(q, k, v, **arguments)
        ledger = Ledger()
        told = prefill.explain(q, k, v, backend=self.backend, **arguments)
        of_kernel, native = self.backend != "reference", is_native(told)
        expected = expect(q, k, v, **arguments, of_kernel=of_kernel, native=native)
        ledger.result(str(arguments), out, lse, expected)
        ledger.finish()
        return out, lse


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def fi4452_rows_before_the_first_key(run: Run) -> None:
    q, k, v = run.inputs(34, 1, (32, 32), 128, BFLOAT16)
    out, lse = run(q, k, v, causal=True)
    assert (out[:33] == 0).all()
    assert (lse[:33] == -math.inf).all()
    assert torch.equal(out[33], v[0])
    assert lse[33].isfinite().all()


def fi4267_logits_below_any_sentinel(run: Run) -> None:
    for dtype in (FLOAT16, BFLOAT16):
        q, k, v = run.inputs(64, 64, dtype=dtype)
        q[..., 0], k[..., 0] = 250.0, -240.0
        out, lse = run.right(q, k, v, sm_scale=1.0)
        assert (lse < -50_000).all()
        assert out.any(-1).all()
        q[:], k[:] = 0.0, 0.0
        q[..., 0], k[..., 0] = 1.0, -1.0
        out, lse = run(q, k, v, sm_scale=1e30, causal=True)
        assert torch.equal(out[0], v[0].repeat_interleave(2, 0))
        assert (lse < -1e30).all()
        assert lse.isfinite().all()


def fi353_fa1343_no_keys(run: Run) -> None:
    q, k, v = run.inputs(4, 0, (8, 2), 128)
    for sinks in (None, per_head(8, -3.0, 3.0, run.device)):
        for kv_layout in ("NHD", "HND"):
            kv = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
            out, lse = run(q, *kv, kv_layout=kv_layout, sinks=sinks)
            assert (out == 0).all()
            none = torch.full((8,), -math.inf) if sinks is None else sinks.cpu() * LOG2_E
            torch.testing.assert_close(lse.cpu(), none.expand(4, 8))


def rows_whose_mask_keeps_nothing(run: Run) -> None:
    q, k, v = run.inputs(40, 130)
    keep = random_mask(40, 130, device=run.device)
    bits = packbits(keep, bitorder="little")
    for mask in ({"custom_mask": keep}, {"packed_custom_mask": bits}):
        out, lse = run(q, k, v, **mask)
        nothing = ~keep.any(1)
        assert nothing.any()
        assert (out[nothing] == 0).all()
        assert (lse[nothing] == -math.inf).all()


def fa_74dfa43_one_long_kv_head(run: Run) -> None:
    run.right(*run.inputs(2, 65_537, (1, 1), 128), causal=True)


def fi2113_fi4485_one_unit_of_lse(run: Run) -> None:
    q, k, v = run.inputs(5, 33)
    logits = torch.einsum("ihd,jhd->ihj", q.double(), k.double().repeat_interleave(2, 1)) / 8
    natural = logits.logsumexp(-1).float()
    torch.testing.assert_close(run(q, k, v)[1], natural * LOG2_E, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(run(q, k, v, lse_base="e")[1], natural, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(run(q, k, v, backend="auto")[1], natural * LOG2_E, rtol=0, atol=1e-4)


def fa1930_one_key_wherever_it_is(run: Run) -> None:
    kv_len = 300 if run.is_small else 4096
    q, k, v = run.inputs(kv_len, kv_len, (1, 1))
    out, lse = run(q, k, v, custom_mask=torch.eye(kv_len, device=run.device).bool())
    assert torch.equal(out, v)
    dots = (q.double() * k.double()).sum(-1) / 8 * LOG2_E
    torch.testing.assert_close(lse.double(), dots, rtol=1e-6, atol=1e-4)


def fi3578_float8_and_a_window_past_256(run: Run) -> None:
    heads = (8, 1) if run.is_small else (64, 8)
    for dtype in (E4M3, E5M2):
        q, k, v = (x.to(dtype) for x in run.inputs(257, 257, heads, 128))
        wide = run.right(q, k, v, causal=True, window_left=511)
        assert wide[0].dtype == BFLOAT16
        assert same(wide, run(q, k, v, causal=True))


def transformers39408_the_window_includes_its_edge(run: Run) -> None:
    q, k, v = run.inputs(8, 8, (1, 1))
    q[:], v[:] = 0.0, 0.0
    v[torch.arange(8), 0, torch.arange(8)] = 3.0
    out, _ = run(q, k, v, causal=True, window_left=2)
    assert out[5, 0, :8].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert torch.equal(run(q, k, v, causal=True, window_left=0)[0], v)


def fi1193_a_cap_of_large_logits(run: Run) -> None:
    q, k, v = run.inputs(16, 80)
    capped, _ = run.right(q * 12, k, v, logits_soft_cap=30.0)
    plain, _ = run.right(q * 12, k, v)
    assert (capped - plain).abs().max() > 0.05


def the_mask_comes_after_the_cap(run: Run) -> None:
    q, k, v = run.inputs(130, 130)
    out, _ = run.right(q, k, v, causal=True, logits_soft_cap=1.0)
    assert torch.equal(out[0], v[0].repeat_interleave(2, 0))


def fi528_head_dims_between_the_usual(run: Run) -> None:
    for dim in (8, 40, 56, 72, 80, 96, 112, 160, 224):
        run.right(*run.inputs(16, 16, dims=dim), causal=True)
    run.right(*run.inputs(16, 70, dims=(64, 224)))
    q, k, v = run.inputs(2, 2, dims=264)
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 256"):
        run(q, k, v)


def fi4976_float8_keys_of_unequal_head_dims(run: Run) -> None:
    q, k, v = run.inputs(99, 99, (4, 4) if run.is_small else (16, 16), (192, 128))
    run.right(q, k.to(E4M3), v.to(E4M3))
    run.right(q, k.to(E5M2), v.to(E4M3), causal=True)


def fi1068_fi385_float8_of_any_head_dim(run: Run) -> None:
    for dim in (64, 128, 256):
        q, k, v = (x.to(E4M3) for x in run.inputs(40, 70, dims=dim))
        run.right(q, k, v, causal=True)


def fi1148_groups_on_the_diagonal(run: Run) -> None:
    for group in range(1, 17):
        for length in (1, 33) if run.is_small else (1, 7, 33, 127, 128, 129):
            run.right(*run.inputs(length, length, (2 * group, 2)), causal=True)


def fi140_any_group(run: Run) -> None:
    for group in (5, 6, 7, 16, 64):
        run.right(*run.inputs(3, 40, (group, 1)))
    q, k, v = run.inputs(3, 5, (5, 2))
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        run(q, k, v)


def pt193893_few_kv_heads(run: Run) -> None:
    for kv_heads in range(1, 9):
        run.right(*run.inputs(9, 40, (2 * kv_heads, kv_heads)))


def fi3176_masks_of_the_wrong_shape(run: Run) -> None:
    q, k, v = run.inputs(10, 20, (8, 4), 128)
    for shape in ((10, 15), (9, 20), (20, 10), (10, 21), (200,), (1, 10, 20)):
        with pytest.raises(ValueError, match="custom_mask has shape"):
            run(q, k, v, custom_mask=torch.ones(shape, dtype=torch.bool, device=run.device))
    for size in (0, 24, 26, 200):
        bits = torch.zeros(size, dtype=torch.uint8, device=run.device)
        with pytest.raises(ValueError, match="25"):
            run(q, k, v, packed_custom_mask=bits)


def fi1290_pt150054_offsets_of_large_masks(run: Run) -> None:
    """Each row keeps one key; the square of the length is beyond 2^31."""
    length = 300 if run.is_small else 49_999
    q, k, v = run.inputs(length, length, (1, 1))
    keep = torch.zeros(length, length, dtype=torch.bool, device=run.device)
    row = torch.arange(length, device=run.device)
    keep[row, row * 7 % length] = True
    assert torch.equal(run(q, k, v, custom_mask=keep)[0], v[row * 7 % length])


def xf813_rows_of_any_number_of_bits(run: Run) -> None:
    for kv_len in (1, 7, 43, 64, 65):
        q, k, v = run.inputs(11, kv_len)
        keep = random_mask(11, kv_len, device=run.device)
        plain = run.right(q, k, v, custom_mask=keep)
        assert same(plain, run(q, k, v, packed_custom_mask=packbits(keep, bitorder="little")))


def fi1489_a_mask_takes_the_place_of_causal(run: Run) -> None:
    q, k, v = run.inputs(16, 16)
    ones = torch.ones(16, 16, dtype=torch.bool, device=run.device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        both = run(q, k, v, causal=True, custom_mask=ones)
    assert any("causal" in str(each.message) for each in said)
    assert same(both, run(q, k, v, custom_mask=ones))
    assert torch.equal(both[0], run(q, k, v)[0])


def fi1028_a_mask_does_not_stay(run: Run) -> None:
    q, k, v = run.inputs(16, 16)
    before = run(q, k, v, causal=True)
    run(q, k, v, custom_mask=random_mask(16, 16, device=run.device))
    assert same(before, run(q, k, v, causal=True))


def fi2150_dims_of_size_1_with_any_stride(run: Run) -> None:
    q, k, v = run.inputs(1, 1, (8, 2), 128)
    odd = [x.as_strided(x.shape, (1, x.stride(1), 1)) for x in (q, k, v)]
    assert same(run.right(q, k, v), run(*odd))
    one_head = run.inputs(5, 9, (1, 1), 128)
    odd = [x.as_strided(x.shape, (x.stride(0), 3, 1)) for x in one_head]
    assert same(run.right(*one_head), run(*odd))


def fi163_fa2541_pt187506_views(run: Run) -> None:
    for dim in (64, 256):
        tensors = run.inputs(33, 70, dims=dim)
        plain = run.right(*tensors)
        for layout in (*IN_PLACE, *COPIED):
            assert same(plain, run(*(relaid(x, layout) for x in tensors))), layout


def fi1865_strides_of_out_are_its_own(run: Run) -> None:
    q, k, v = run.inputs(33, 70)
    plain = run.right(q, k, v)
    wide_q = relaid(q, "wide heads")
    assert same(plain, run(wide_q, k, v, out=torch.full_like(q, math.nan)))
    wide = amid_nan((33, 4, 64), (1, 1, 8), (1, 1, 16), FLOAT16, run.device)
    assert same(plain, run(q, k, v, out=wide.view))
    assert not wide.written_outside().any()
    assert run(wide_q, k, v)[0].is_contiguous()


def fi941_fa1745_memory_past_the_keys(run: Run) -> None:
    q, k, v = run.inputs(3, 300)
    edges = (1, 12, 13, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    for kv_len in edges if run.is_small else range(1, 258):
        clean = run(q, k[:kv_len].clone(), v[:kv_len].clone(), causal=True)
        for stray in (math.nan, math.inf):
            cache = k.clone(), v.clone()
            for x in cache:
                x[kv_len:] = stray
            assert same(clean, run(q, *(x[:kv_len] for x in cache), causal=True)), kv_len


def fi3890_parts_that_end_anywhere(run: Run) -> None:
    q, k, v = run.inputs(3, 1000, (8, 2))
    expected = expect(q, k, v, causal=True)
    ledger = Ledger()
    for num_splits in (1, 2, 3, 7, 16, 48, 256):
        arguments = {"backend": run.backend, "num_splits": num_splits}
        result = split_attention(q, k, v, causal=True, return_lse=True, **arguments)
        ledger.result(f"{num_splits} parts", *result, expected)
    ledger.finish()


def lengths_around_the_tiles(run: Run) -> None:
    for tile in (64, 96, 128, 176, 192):
        for kv_len in (tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 1):
            run.right(*run.inputs(5, kv_len), causal=True)


def vl51363_each_scale_alone(run: Run) -> None:
    for dtypes in ((FLOAT16, FLOAT16), (FLOAT16, E4M3), (E4M3, E4M3)):
        q, k, v = run.inputs(7, 19, (6, 3))
        q, k, v = q.to(dtypes[0]), k.to(dtypes[1]), v.to(dtypes[1])
        plain, _ = run(q, k, v)
        for name, heads in (("scale_q", 6), ("scale_k", 3), ("scale_v", 3)):
            scaled, _ = run.right(q, k, v, **{name: per_head(heads, 0.5, 2.75, run.device)})
            assert ((scaled - plain).abs().amax((0, 2)) > 0).all(), name


def fa2109_flat_scores_of_many_float8_keys(run: Run) -> None:
    kv_len = 2000 if run.is_small else 32_768
    q, k, v = run.inputs(2, kv_len)
    q[:] = 0.0
    for dtype in (FLOAT16, E4M3):
        tensors = (q.to(dtype), k.to(E4M3), torch.ones_like(v).to(E4M3))
        out, lse = run(*tensors)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=2.0**-7, atol=0)
        all_keys = torch.full_like(lse, math.log2(kv_len))
        torch.testing.assert_close(lse, all_keys, rtol=1e-6, atol=1e-4)


def fa1848_explain_says_which_kernel_ran(run: Run) -> None:
    tensors = run.inputs(40, 70)
    told = prefill.explain(*tensors, backend=run.backend)
    assert told.backend == run.backend
    if run.backend == "reference":
        assert told.kernel is None
    else:
        assert told.kernel is not None
        assert told.kernel.startswith(f"{run.backend}_float16_64x64")


def fa1710_names_of_arguments(run: Run) -> None:
    names = list(inspect.signature(prefill.single_prefill_with_kv_cache).parameters)
    documented = (
        "q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal kv_layout "
        "pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale "
        "rope_theta backend return_lse"
    )
    assert names[:20] == documented.split()
    with pytest.raises(TypeError, match="descale_q"):
        run(*run.inputs(2, 2), descale_q=1.0)


def scales_of_the_wrong_kind(run: Run) -> None:
    tensors = run.inputs(7, 19, (6, 3))
    with pytest.raises(ValueError, match="scale_k"):
        run(*tensors, scale_k=torch.ones(6, device=run.device))
    with pytest.raises(TypeError, match="scale_q"):
        run(*tensors, scale_q=torch.ones(6, device=run.device).double())
    with pytest.raises(ValueError, match="scale_v"):
        run(*tensors, scale_v=torch.ones(3, device="meta"))


def fi4297_fp16_reduction(run: Run) -> None:
    q, k, v = run.inputs(20, 70)
    q, k = q * 30, k * 30  # products far beyond float16
    keep = torch.ones(20, 70, dtype=torch.bool, device=run.device)
    keep[[0, 7]] = False
    out, lse = run(q, k, v, use_fp16_qk_reduction=True, sm_scale=1e-4, custom_mask=keep)
    exact, exact_lse = run.right(q, k, v, sm_scale=1e-4, custom_mask=keep)
    assert out.isfinite().all()
    assert (out[[0, 7]] == 0).all()
    assert (lse[[0, 7]] == -math.inf).all()
    torch.testing.assert_close(out, exact, rtol=0.05, atol=0.05)
    torch.testing.assert_close(lse, exact_lse, rtol=0.05, atol=0.05)


def fi200_slopes_of_any_number_of_heads(run: Run) -> None:
    for heads in (1, 12, 40, 66):
        run.right(*run.inputs(3, 40, (heads, heads)), pos_encoding_mode="ALIBI", causal=True)


def fi1606_a_rank_gives_its_own_slopes(run: Run) -> None:
    q, k, v = run.inputs(5, 40, (16, 16))
    slopes = torch.tensor([2.0 ** (-(head + 1) / 2) for head in range(16)], device=run.device)
    whole = run.right(q, k, v, pos_encoding_mode="ALIBI")
    for rank in (slice(0, 8), slice(8, 16)):
        part = [x[:, rank] for x in (q, k, v)]
        result = run.right(*part, pos_encoding_mode="ALIBI", alibi_slopes=slopes[rank])
        torch.testing.assert_close(result[0], whole[0][:, rank], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(result[1], whole[1][:, rank], rtol=1e-5, atol=1e-4)


def fi746_the_documented_rotation(run: Run) -> None:
    tensors = run.inputs(12, 40)
    plain = run.right(*tensors, pos_encoding_mode="ROPE_LLAMA")
    slow = run.right(*tensors, pos_encoding_mode="ROPE_LLAMA", rope_scale=8.0)
    assert not torch.equal(plain[0], slow[0])
    run.right(*run.inputs(40, 12), pos_encoding_mode="ROPE_LLAMA", rope_theta=5e5)


def fi1413_a_mode_that_is_no_string(run: Run) -> None:
    with pytest.raises(TypeError, match="pos_encoding_mode"):
        run(*run.inputs(2, 2), pos_encoding_mode=0)


def sg24853_fa832_the_same_bits_again(run: Run) -> None:
    """Also behind calls that were refused, and behind calls of another backend."""
    tensors = run.inputs(64, 2000, (8, 2))
    first = run(*tensors, causal=True)
    for _ in range(3 if run.is_small else 1000):
        with pytest.raises(TypeError, match="window_left"):
            run(*tensors, causal=True, window_left="7")
        run(*tensors, causal=True, backend="auto")
        assert same(first, run(*tensors, causal=True))


REPORTS: dict[str, Callable[[Run], None]] = {
    report.__name__: report
    for report in (
        fi4452_rows_before_the_first_key,
        fi4267_logits_below_any_sentinel,
        fi353_fa1343_no_keys,
        rows_whose_mask_keeps_nothing,
        fa_74dfa43_one_long_kv_head,
        fi2113_fi4485_one_unit_of_lse,
        fa1930_one_key_wherever_it_is,
        fi3578_float8_and_a_window_past_256,
        transformers39408_the_window_includes_its_edge,
        fi1193_a_cap_of_large_logits,
        the_mask_comes_after_the_cap,
        fi528_head_dims_between_the_usual,
        fi4976_float8_keys_of_unequal_head_dims,
        fi1068_fi385_float8_of_any_head_dim,
        fi1148_groups_on_the_diagonal,
        fi140_any_group,
        pt193893_few_kv_heads,
        fi3176_masks_of_the_wrong_shape,
        fi1290_pt150054_offsets_of_large_masks,
        xf813_rows_of_any_number_of_bits,
        fi1489_a_mask_takes_the_place_of_causal,
        fi1028_a_mask_does_not_stay,
        fi2150_dims_of_size_1_with_any_stride,
        fi163_fa2541_pt187506_views,
        fi1865_strides_of_out_are_its_own,
        fi941_fa1745_memory_past_the_keys,
        fi3890_parts_that_end_anywhere,
        lengths_around_the_tiles,
        vl51363_each_scale_alone,
        fa2109_flat_scores_of_many_float8_keys,
        fa1848_explain_says_which_kernel_ran,
        fa1710_names_of_arguments,
        scales_of_the_wrong_kind,
        fi4297_fp16_reduction,
        fi200_slopes_of_any_number_of_heads,
        fi1606_a_rank_gives_its_own_slopes,
        fi746_the_documented_rotation,
        fi1413_a_mode_that_is_no_string,
        sg24853_fa832_the_same_bits_again,
    )
}
