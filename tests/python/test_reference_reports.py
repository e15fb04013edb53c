"""What went wrong for users of kernels like this one, where the reference can be held to more.

`user_reports` has the kinds of fault for every backend, with the tolerance of kernels. Here are
those in which the reference owes the same bits, every row of a sum, or no more work. The numbers in
the names are flashinfer's reports.
"""

import math

import pytest
import torch

import prefill
from naive import assert_exact, make_qkv, naive_attention, reference
from prefill import reference as module
from prefill.rope import alibi_slopes


def call(q, k, v, **arguments):
    return prefill.single_prefill_with_kv_cache(q, k, v, backend="reference", **arguments)


def test_logits_of_minus_1e30_win_over_masked_ones():
    q, k, v = make_qkv(8, 8, (2, 1), 8)
    q[..., :], k[..., :] = 1.0, -1.0
    out, lse = call(q, k, v, sm_scale=1e30 / 8, causal=True, return_lse=True)
    rows = torch.arange(1, 9)[:, None, None]
    expected = v.double().cumsum(0) / rows
    torch.testing.assert_close(out.double(), expected.expand(8, 2, 8), rtol=1e-3, atol=1e-4)
    assert (lse < -1e30).all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_fi714_work_of_a_window_does_not_grow_with_the_keys(causal, monkeypatch):
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


def test_a_mask_of_the_causal_triangle_is_causal():
    """The example of the function's documentation, smaller."""
    q, k, v = make_qkv(16, 50, (8, 2), 32)
    mask = torch.tril(torch.full((16, 50), True), diagonal=50 - 16)
    assert torch.equal(call(q, k, v, custom_mask=mask), call(q, k, v, causal=True))


@pytest.mark.parametrize("heads", [12, 40, 66])
def test_fi200_slopes_of_any_number_of_heads(heads):
    q, k, v = make_qkv(3, 9, (heads, heads), 8)
    by_rule = assert_exact(q, k, v, pos_encoding_mode="ALIBI", causal=True)
    given = reference(
        q, k, v, pos_encoding_mode="ALIBI", causal=True, alibi_slopes=alibi_slopes(heads)
    )
    assert torch.equal(by_rule[0], given[0])
    assert torch.equal(by_rule[1], given[1])


def test_fi1606_a_rank_gives_its_own_slopes():
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


def test_the_naive_rule_itself_on_two_keys():
    """A case small enough to compute by hand: logits 0 and ln 3, values 1 and 5."""
    q = torch.tensor([[[1.0] + [0.0] * 7]])
    k = torch.tensor([[[0.0] * 8], [[math.log(3)] + [0.0] * 7]])
    v = torch.tensor([[[1.0] * 8], [[5.0] * 8]])
    out, lse = naive_attention(q, k, v, sm_scale=1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 8), 4.0, dtype=torch.float64))
    assert lse.item() == pytest.approx(2.0)
