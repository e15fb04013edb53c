"""Transformers' models on the kernels, against the same models on "eager"; skipped without it.

The yardstick is that of the CPU tier: off by at most twice what eager attention in the same 16 bits
is off by. The sequences are longer than there, so that kernels have several tiles to go through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", "5.24")

from language_models import (
    CLEAR_CUT,
    DECODERS,
    ENCODERS,
    assert_as_good_as_eager,
    assert_chunks_as_good_as_eager,
    assert_generates_eagers_tokens,
    generate,
    make,
    on,
    padded,
    result,
    tokens,
)
from prefill.integrations.transformers import register

pytestmark = pytest.mark.usefixtures("integration_on_kernels")
DEVICE = "cuda"
LENGTH = 200
DTYPES = (torch.bfloat16, torch.float16)
Model = Callable[[], Any]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", [*DECODERS, *ENCODERS])
def test_logits(backend: str, model: Model, dtype: torch.dtype) -> None:
    register(backend)
    assert_as_good_as_eager(make(model, dtype, device=DEVICE), input_ids=tokens(2, LENGTH))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", [*DECODERS, *ENCODERS])
def test_logits_of_the_backend_that_auto_takes(model: Model, dtype: torch.dtype) -> None:
    register()
    assert_as_good_as_eager(make(model, dtype, device=DEVICE), input_ids=tokens(2, LENGTH))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", [*DECODERS, *ENCODERS])
def test_padding(backend: str, model: Model, side: str, dtype: torch.dtype) -> None:
    register(backend)
    mask = padded([LENGTH, 77, 1], side)
    ids = tokens(3, LENGTH) * mask
    assert_as_good_as_eager(
        make(model, dtype, device=DEVICE), real=mask, input_ids=ids, attention_mask=mask
    )


@pytest.mark.parametrize("model", DECODERS)
def test_padding_with_holes(backend: str, model: Model) -> None:
    """What ranges of keys cannot say: a bool mask for each request."""
    register(backend)
    mask = padded([LENGTH, 120], "left")
    mask[0, 40:71] = 0
    assert_as_good_as_eager(
        make(model, torch.float16, device=DEVICE),
        real=mask,
        input_ids=tokens(2, LENGTH),
        attention_mask=mask,
    )


@pytest.mark.parametrize("lengths", [(70, 70, 60), (198, 1, 1), (30, 150, 20)])
@pytest.mark.parametrize("model", DECODERS)
def test_chunks_through_the_cache(backend: str, model: Model, lengths: tuple[int, ...]) -> None:
    register(backend)
    assert_chunks_as_good_as_eager(
        make(model, torch.float16, device=DEVICE), tokens(2, sum(lengths)), lengths
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("model", "seed"), CLEAR_CUT)
def test_generation(backend: str, model: Model, seed: int, cache: str | None) -> None:
    register(backend)
    assert_generates_eagers_tokens(model, seed, cache, DEVICE)


@pytest.mark.parametrize("model", DECODERS)
def test_generation_after_long_prompts(backend: str, model: Model) -> None:
    """In bfloat16: tokens are eager's up to one that rounding may have moved.

    Logits that come of the same tokens are within twice what eager attention is off by in bfloat16,
    on eager's own tokens; so tokens that lead by more than twice that are the same.
    """
    register(backend)
    generator = make(model, torch.bfloat16, device=DEVICE)
    mask = padded([LENGTH, 77], "left")
    inputs = {"input_ids": tokens(2, LENGTH) * mask, "attention_mask": mask}
    exact = on("eager", generator, torch.float32)
    right, logits = generate(exact, inputs)
    ours, our_logits = generate(on("prefill", generator), inputs)

    real = torch.cat((mask, torch.ones_like(right[:, LENGTH:])), 1)
    every = {"input_ids": right, "attention_mask": real}
    off = (result(on("eager", generator), **every) - result(exact, **every)).abs().amax(-1)
    allowed = 2 * off[real.bool()].max()
    same = (ours == right)[:, LENGTH:].cumprod(-1).bool()
    same_past = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), 1)
    assert (our_logits - logits)[same_past].abs().max() <= allowed
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second)[same_past & ~same].le(2 * allowed).all()
