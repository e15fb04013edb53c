"""The packaged activations, and the reference backend on them."""

import pytest
import torch

import prefill
from naive import reference
from prefill.data import load_real_activations

DATA = load_real_activations()


def test_shapes_and_facts():
    shapes = {
        "q_pre": (192, 9, 64),
        "k_pre": (192, 3, 64),
        "q": (512, 9, 64),
        "k": (512, 3, 64),
        "v": (512, 3, 64),
        "o_ref": (512, 9, 64),
        "lse2_ref": (512, 9),
    }
    for name, shape in shapes.items():
        tensor = getattr(DATA, name)
        assert tensor.shape == shape
        assert tensor.dtype == (torch.float32 if name.endswith("_ref") else torch.float16)
        assert tensor.is_contiguous()
        assert tensor.isfinite().all()
    assert (DATA.sm_scale, DATA.rope_theta, DATA.rope_scale) == (0.125, 1e5, 1.0)
    assert "SmolLM2" in DATA.metadata["model"]


def test_each_load_is_its_own():
    other = load_real_activations()
    assert torch.equal(other.q, DATA.q)
    other.q.zero_()
    assert DATA.q.any()


@pytest.mark.parametrize("length", [1, 63, 300, 512])
def test_reference_meets_the_recorded_results(length):
    q, k, v = DATA.q[:length], DATA.k[:length], DATA.v[:length]
    out, lse = reference(q, k, v, causal=True, sm_scale=DATA.sm_scale, o_dtype=torch.float32)
    torch.testing.assert_close(out, DATA.o_ref[:length], rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(lse, DATA.lse2_ref[:length], rtol=2e-7, atol=2e-7)


def test_output_in_float16_is_the_recorded_one_rounded():
    out, lse = prefill.single_prefill_with_kv_cache(
        DATA.q, DATA.k, DATA.v, causal=True, backend="reference", return_lse=True
    )
    torch.testing.assert_close(out, DATA.o_ref.half(), rtol=2**-10, atol=0)
    torch.testing.assert_close(lse, DATA.lse2_ref, rtol=2e-7, atol=2e-7)


def test_rope_inside_the_call_meets_the_model():
    """q_pre and k_pre are rounded before the rotation, q and k after it: half an ulp each."""
    out, lse = reference(
        DATA.q_pre,
        DATA.k_pre,
        DATA.v[:192],
        causal=True,
        sm_scale=DATA.sm_scale,
        pos_encoding_mode="ROPE_LLAMA",
        rope_theta=DATA.rope_theta,
        rope_scale=DATA.rope_scale,
        o_dtype=torch.float32,
    )
    assert (out - DATA.o_ref[:192]).abs().max() < 0.02
    assert (lse - DATA.lse2_ref[:192]).abs().max() < 0.02
