"""merge_state and merge_states: attention over parts of the keys adds up to attention over all."""

import itertools

import pytest
import torch

from naive import make_qkv, reference
from prefill import merge_state, merge_states

INF = torch.inf


def parts_of(q, k, v, cuts, **arguments):
    """Attend to each part of the keys by itself."""
    bounds = [0, *cuts, k.shape[0]]
    return [
        reference(q, k[a:b], v[a:b], o_dtype=torch.float32, **arguments)
        for a, b in itertools.pairwise(bounds)
    ]


@pytest.mark.parametrize("lse_base", ["2", "e"])
@pytest.mark.parametrize("cuts", [[40], [0, 1, 64], [100, 100], list(range(10, 100, 10))])
def test_parts_merge_to_the_whole(cuts, lse_base):
    q, k, v = make_qkv(9, 100, (4, 2), (16, 8), spread=3.0)
    whole = reference(q, k, v, o_dtype=torch.float32, lse_base=lse_base)
    states = parts_of(q, k, v, cuts, lse_base=lse_base)
    at_once = merge_states(
        torch.stack([o for o, _ in states], 1),
        torch.stack([s for _, s in states], 1),
        lse_base=lse_base,
    )
    one_by_one = states[0]
    for state in states[1:]:
        one_by_one = merge_state(*one_by_one, *state, lse_base=lse_base)
    # A state's LSE is rounded to float32: its weight is off by that share of the LSE.
    allowance = 2**-23 * whole[1].abs().max().item() * v.abs().max().item()
    for merged in (at_once, one_by_one):
        torch.testing.assert_close(merged[0], whole[0], rtol=0, atol=allowance)
        torch.testing.assert_close(merged[1], whole[1], rtol=2e-6, atol=2e-6)


def test_two_states_merge_alike_either_way():
    o, lse = torch.randn(5, 2, 3, 8).half(), torch.randn(5, 2, 3) * 10
    pair = merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])
    both = merge_states(o, lse)
    assert torch.equal(pair[0], both[0])
    assert torch.equal(pair[1], both[1])


def test_base_2_as_a_number():
    o, lse = torch.randn(5, 2, 3, 8), torch.randn(5, 2, 3)
    for ours, expected in zip(merge_states(o, lse, lse_base=2), merge_states(o, lse), strict=True):
        assert torch.equal(ours, expected)


def test_large_and_distant_lses():
    o = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1, 1)
    for base in (1e4, -1e4, 1e30, -1e30):
        merged, lse = merge_states(o, torch.full((1, 3, 1), base))
        assert merged.item() == pytest.approx(7 / 3)
        assert lse.item() == pytest.approx(base + 1.584962500721156)
    merged, lse = merge_states(o, torch.tensor([-1e30, 5.0, -300.0]).view(1, 3, 1))
    assert (merged.item(), lse.item()) == (2.0, 5.0)


class TestEmptyStates:
    @pytest.mark.parametrize("rubbish", [0.0, torch.nan, INF])
    def test_an_empty_state_changes_nothing(self, rubbish):
        o, lse = torch.randn(4, 3, 8, dtype=torch.bfloat16), torch.randn(4, 3)
        nothing = torch.full_like(o, rubbish), torch.full_like(lse, -INF)
        for merged in (merge_state(o, lse, *nothing), merge_state(*nothing, o, lse)):
            assert torch.equal(merged[0], o)
            assert torch.equal(merged[1], lse)

    def test_empty_with_empty_is_empty(self):
        o, lse = torch.full((4, 5, 3, 8), torch.nan).half(), torch.full((4, 5, 3), -INF)
        merged = merge_states(o, lse)
        assert torch.equal(merged[0], torch.zeros(4, 3, 8, dtype=torch.float16))
        assert torch.equal(merged[1], torch.full((4, 3), -INF))

    def test_no_states(self):
        merged = merge_states(torch.empty(4, 0, 3, 8).half(), torch.empty(4, 0, 3))
        assert torch.equal(merged[0], torch.zeros(4, 3, 8, dtype=torch.float16))
        assert torch.equal(merged[1], torch.full((4, 3), -INF))

    def test_no_rows(self):
        merged = merge_states(torch.empty(0, 2, 3, 8), torch.empty(0, 2, 3))
        assert merged[0].shape == (0, 3, 8)
        assert merged[1].shape == (0, 3)


class TestInfinityAndNan:
    def merge(self, *lses):
        o = (2.0 ** torch.arange(len(lses))).view(1, -1, 1, 1)
        merged, lse = merge_states(o, torch.tensor(lses).view(1, -1, 1))
        return merged.item(), lse.item()

    def test_plus_infinity_outweighs(self):
        assert self.merge(0.0, INF, -INF) == (2.0, INF)
        assert self.merge(INF, 3.0, INF) == (2.5, INF)

    @pytest.mark.parametrize("others", [(0.0,), (INF,), (-INF,), (-INF, INF, 1.0)])
    def test_nan_shows(self, others):
        for lses in itertools.permutations((torch.nan, *others)):
            merged, lse = self.merge(*lses)
            assert merged != merged
            assert lse != lse


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_output_keeps_its_dtype_and_the_lse_is_float32(self, dtype):
        o, lse = torch.randn(2, 2, 3, 8).to(dtype), torch.randn(2, 2, 3)
        merged = merge_states(o, lse)
        assert (merged[0].dtype, merged[1].dtype) == (dtype, torch.float32)

    def test_float64_is_kept(self):
        o = torch.randn(2, 2, 3, 8, dtype=torch.float64)
        lse = torch.randn(2, 2, 3, dtype=torch.float64)
        merged = merge_states(o, lse)
        weights = torch.softmax(lse * torch.log(torch.tensor(2.0, dtype=torch.float64)), 1)
        assert merged[1].dtype == torch.float64
        torch.testing.assert_close(merged[0], (weights[..., None] * o).sum(1))
        torch.testing.assert_close(merged[1], lse.exp2().sum(1).log2())

    def test_wide_computation_of_narrow_outputs(self):
        """A thousand equal states: a running sum in float16 would stop at 2,048."""
        o, lse = torch.full((1, 4096, 1, 8), 1.5).half(), torch.zeros(1, 4096, 1)
        merged = merge_states(o, lse)
        assert torch.equal(merged[0], torch.full((1, 1, 8), 1.5).half())
        assert merged[1].item() == 12.0


def test_traces_whole():
    o, lse = torch.randn(4, 3, 2, 8).half(), torch.randn(4, 3, 2)
    compiled = torch.compile(merge_states, backend="eager", fullgraph=True)
    for ours, expected in zip(compiled(o, lse), merge_states(o, lse), strict=True):
        assert torch.equal(ours, expected)


def test_errors():
    o, lse = torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3)
    with pytest.raises(ValueError, match=r"\(4, 2, 3\); got \(4, 3\)\. Pass the LSE"):
        merge_states(o, lse[:, 0])
    with pytest.raises(ValueError, match=r"o must be \[len, num_states, heads, head_dim\]"):
        merge_states(o[:, 0], lse[:, 0])
    with pytest.raises(ValueError, match=r"\(4, 2, 3, 8\); two states go to merge_state, any"):
        merge_state(o, lse, o, lse)
    with pytest.raises(ValueError, match=r"one shape.*same queries over different keys"):
        merge_state(o[:, 0], lse[:, 0], o[:2, 0], lse[:2, 0])
    with pytest.raises(ValueError, match=r"lse_base='10' is unknown; expected '2' .* or 'e'"):
        merge_states(o, lse, lse_base="10")
    for wrong in ("10", 2.0, True):
        with pytest.raises(ValueError, match=r"expected '2' .* or 'e'"):
            merge_states(o[:, :0], lse[:, :0], lse_base=wrong)
    with pytest.raises(ValueError, match=r"o_a and o_b must be on one device.*move one state"):
        merge_state(o[:, 0], lse[:, 0], o[:, 0].to("meta"), lse[:, 0].to("meta"))
    with pytest.raises(TypeError, match=r"one dtype.*cast one with \.to\(dtype\)"):
        merge_state(o[:, 0], lse[:, 0], o[:, 0].half(), lse[:, 0])
    with pytest.raises(TypeError, match=r"floating-point.*\.float\(\)"):
        merge_states(o.int(), lse)
    with pytest.raises(TypeError, match=r"of type list; expected a torch\.Tensor\. Convert it"):
        merge_states([o], lse)
    with pytest.raises(ValueError, match=r"o and lse must be on one device.*move one with"):
        merge_states(o, lse.to("meta"))
