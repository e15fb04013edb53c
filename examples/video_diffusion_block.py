"""Joint attention of a video diffusion block: full attention, padding by lengths.

The tokens of a clip (frames x height x width) and of its prompt attend to each other, without
order. Prompts of a batch differ in length, so they are padded; a mask over the padding would be
[tokens, tokens] for each clip. The prompt comes after the video, so the real tokens of a clip are
one slice, and each clip is a call on it: no mask, and padding costs nothing.

Run it: python examples/video_diffusion_block.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prefill import single_prefill_with_kv_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FRAMES, HEIGHT, WIDTH = 4, 6, 8
PROMPT_LENGTHS = (20, 7, 1)
HEADS, HEAD_DIM = 4, 64
VIDEO = FRAMES * HEIGHT * WIDTH
PADDED = VIDEO + max(PROMPT_LENGTHS)


class JointAttention(nn.Module):
    """Projects, normalises q and k per head as video models do, attends."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.to_qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, lengths: list[int], masked: bool = False) -> Tensor:
        """X `[clips, tokens, width]`, of which the first `lengths` tokens are real; 0 elsewhere."""
        clips, tokens, _ = x.shape
        qkv = self.to_qkv(x).view(clips, tokens, 3, HEADS, HEAD_DIM)
        q, k, v = self.q_norm(qkv[:, :, 0]), self.k_norm(qkv[:, :, 1]), qkv[:, :, 2]
        attended = (attend_with_masks if masked else attend)(q, k, v, lengths)
        return self.to_out(attended.flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """A call for each clip, on its real tokens; v is read inside the fused projection."""
    out = torch.zeros_like(q)
    for clip, length in enumerate(lengths):
        real = slice(0, length)
        single_prefill_with_kv_cache(
            q[clip, real], k[clip, real], v[clip, real], out=out[clip, real]
        )
    return out


def attend_with_masks(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """The same with a mask over the padding."""
    token = torch.arange(q.shape[1], device=q.device)
    return torch.stack(
        [
            single_prefill_with_kv_cache(
                q[clip],
                k[clip],
                v[clip],
                custom_mask=(token < length) & (token < length)[:, None],
            )
            for clip, length in enumerate(lengths)
        ]
    )


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    block = JointAttention().to(DEVICE, torch.bfloat16).eval()
    lengths = [VIDEO + prompt for prompt in PROMPT_LENGTHS]
    x = torch.randn(len(lengths), PADDED, HEADS * HEAD_DIM).to(DEVICE, torch.bfloat16)
    out = block(x, lengths)
    masked = block(x, lengths, masked=True)
    # The kernels may go through another order of tiles; one unit of bfloat16 then.
    torch.testing.assert_close(out, masked, rtol=2.0**-7, atol=2.0**-7)
    padding = 1 - sum(lengths) / (len(lengths) * PADDED)
    print(f"{len(lengths)} clips of {lengths} tokens: right without masks; padding {padding:.0%}")


if __name__ == "__main__":
    main()
