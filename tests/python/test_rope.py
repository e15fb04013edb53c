"""Rotary positions and ALiBi slopes against their definitions in exact arithmetic."""

import math

import pytest
import torch

from prefill.rope import alibi_slopes, apply_llama_rope, rope_angles


@pytest.mark.parametrize(("scale", "theta"), [(1.0, 1e4), (8.0, 5e5)])
@pytest.mark.parametrize("first", [0, -3, 131_000, 1_000_000, (1 << 30) - 4])
def test_rotation_pairs_halves_at_each_position(first, scale, theta):
    x = torch.randn(4, 3, 16, dtype=torch.float64)
    rotated = apply_llama_rope(x, first, scale, theta)
    for r in range(4):
        for d in range(8):
            angle = (first + r) / scale * theta ** (-2 * d / 16)
            cos, sin = math.cos(angle), math.sin(angle)
            x1, x2 = x[r, :, d], x[r, :, d + 8]
            # The angle of position 2^30 is known to 2^30 / 2^53 in float64.
            torch.testing.assert_close(rotated[r, :, d], x1 * cos - x2 * sin, rtol=0, atol=3e-6)
            torch.testing.assert_close(rotated[r, :, d + 8], x2 * cos + x1 * sin, rtol=0, atol=3e-6)


def test_angles_at_a_million_are_right_to_float32():
    """The fractions of a turn, computed with integers: theta = 2^16, head_dim 8, so 2^(-4d)."""
    positions = torch.tensor([1_000_000, 1_048_576, -999_999])
    angles = rope_angles(positions, 8, 1.0, 65536.0)
    for row, position in enumerate(positions.tolist()):
        for d in range(4):
            exact = math.sin(position / 16**d)  # the argument is exact, and so is libm's sine
            assert abs(angles[row, d].sin().item() - exact) < 1e-9


def test_rounds_once_to_the_dtype_asked_for():
    x = torch.randn(5, 2, 8).to(torch.float8_e4m3fn)
    exact = apply_llama_rope(x, 7, dtype=torch.float64)
    assert apply_llama_rope(x, 7).dtype == torch.float8_e4m3fn
    half = apply_llama_rope(x, 7, dtype=torch.float16)
    torch.testing.assert_close(half, exact.to(torch.float16), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates(dtype):
    largest = torch.finfo(dtype).max
    x = torch.full((8, 1, 8), largest).to(dtype)
    rotated = apply_llama_rope(x, 0).float()
    assert rotated.isfinite().all()
    assert rotated.abs().max() == largest


def test_blocks_do_not_show(monkeypatch):
    x = torch.randn(50, 3, 16, dtype=torch.bfloat16)
    whole = apply_llama_rope(x, -5)
    monkeypatch.setattr("prefill.rope._BLOCK_ELEMENTS", 100)
    assert torch.equal(apply_llama_rope(x, -5), whole)


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="must be even, got 9"):
        apply_llama_rope(torch.zeros(1, 1, 9), 0)


def test_slopes_of_eight_heads():
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]


@pytest.mark.parametrize("heads", [1, 2, 3, 12, 40, 66, 71, 128])
def test_slopes_follow_the_paper(heads):
    """The recursive rule of the paper's own code, written anew."""

    def slopes(count):
        n = 2 ** math.floor(math.log2(count))
        if n == count:
            return [2 ** (-8 * k / n) for k in range(1, n + 1)]
        return slopes(n) + slopes(2 * n)[::2][: count - n]

    ours = alibi_slopes(heads)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), torch.tensor(slopes(heads), dtype=torch.float64))


def test_no_heads_no_slopes():
    assert alibi_slopes(0).shape == (0,)
