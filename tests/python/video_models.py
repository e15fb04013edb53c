"""Small models of diffusers with random weights, held against themselves on torch's attention.

Right is torch's attention in float32; how far 16 bits may be from it is what torch's attention is
off by in 16 bits, on the same weights. `video` is (frames, height, width).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers import HunyuanVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor

BATCH, TEXT, TEXT_LENGTHS = 2, 7, (7, 3)
Made = tuple[Any, dict[str, Tensor]]


def wan(video: tuple[int, int, int] = (3, 8, 8)) -> Made:
    """Self-attention over frames, cross-attention to text: no masks."""
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, *video),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
    }
    return model, inputs


def hunyuan(video: tuple[int, int, int] = (2, 5, 4)) -> Made:
    """Joint attention of frames and text, the text's padding masked."""
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        guidance_embeds=False,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    mask = torch.arange(TEXT) < torch.tensor(TEXT_LENGTHS)[:, None]
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, *video),
        "timestep": torch.tensor([10, 500]),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 16),
        "pooled_projections": torch.randn(BATCH, 8),
        "encoder_attention_mask": mask,
    }
    return model, inputs


MODELS: tuple[Callable[..., Made], ...] = (wan, hunyuan)


def ready(made: Made, dtype: torch.dtype, device: str = "cpu") -> Made:
    """Model and inputs in that dtype on that device, with weights that make attention uneven."""
    model, inputs = made
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.eval().to(device, dtype), {k: x.to(device) for k, x in cast(inputs, dtype).items()}


def cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def result(model: Any, attention: str, dtype: torch.dtype, inputs: dict[str, Tensor]) -> Tensor:
    other = copy.deepcopy(model).to(dtype)
    other.set_attention_backend(attention)
    return other(**cast(inputs, dtype)).sample.float()


def assert_as_good_as_torch(model: Any, inputs: dict[str, Tensor]) -> None:
    """Off by at most twice what torch's attention is off by."""
    right = result(model, "native", torch.float32, inputs)
    torchs = result(model, "native", model.dtype, inputs)
    ours = result(model, "prefill", model.dtype, inputs)
    allowed = 2 * (torchs - right).abs().max()
    assert (ours - right).abs().max() <= allowed
    # Rounding is all that it is: a small part of the results' own size.
    assert allowed < 0.1 * right.abs().max()
