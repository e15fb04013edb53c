"""Speculative decoding: a tree of drafted tokens is verified by one pass.

A draft model guesses several continuations that share their beginnings: a tree. The model reads the
whole tree at once; every node sees the cache and its own ancestors, by a mask. Where the model's
own choice after a node is one of its children, that child is accepted. The accepted path is what
the model would have decoded token by token; that is checked here, with one attention layer as the
model.

Run it: python examples/tree_speculation.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill import (
    merge_state,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, PROMPT = 64, 40
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64


class Model:
    """Tokens and their positions in, the next token out: one layer of attention."""

    def __init__(self) -> None:
        width = NUM_QO_HEADS * HEAD_DIM

        def weights(*shape: int) -> Tensor:
            return (torch.randn(shape) / shape[0] ** 0.5).to(DEVICE, torch.float16)

        self.tokens = weights(VOCABULARY, width) * VOCABULARY**0.5
        self.positions = weights(2 * PROMPT, width) * (2 * PROMPT) ** 0.5
        self.to_q = weights(width, width)
        self.to_k, self.to_v = (weights(width, NUM_KV_HEADS * HEAD_DIM) for _ in range(2))
        self.to_logits = weights(width, VOCABULARY)

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v `[tokens, heads, dim]`."""
        x = self.tokens[tokens] + self.positions[positions]
        q, k, v = (
            (x @ weights).view(len(tokens), -1, HEAD_DIM)
            for weights in (self.to_q, self.to_k, self.to_v)
        )
        return q, k, v

    def choose(self, attended: Tensor) -> Tensor:
        """The most likely next token of each row, from `[rows, heads, dim]`."""
        return (attended.flatten(1) @ self.to_logits).argmax(-1)


@dataclass
class Tree:
    """The last token that is decided, node 0, and the drafted ones; node i follows `parent[i]`."""

    tokens: Tensor
    parent: list[int]

    def ancestors(self) -> Tensor:
        """Bool [nodes, nodes]: row i sees its ancestors and itself."""
        seen = torch.eye(len(self.parent), dtype=torch.bool, device=DEVICE)
        for node, before in enumerate(self.parent[1:], 1):
            seen[node] |= seen[before]
        return seen


def decode(model: Model, prompt: Tensor, count: int) -> list[int]:
    """Greedy decoding, a token at a time."""
    tokens = prompt
    for _ in range(count):
        q, k, v = model.project(tokens, torch.arange(len(tokens), device=DEVICE))
        attended = single_prefill_with_kv_cache(q[-1:], k, v, causal=True)
        tokens = torch.cat((tokens, model.choose(attended)))
    return tokens[len(prompt) :].tolist()


def draft(last: int, right: list[int]) -> Tree:
    """What a draft model could have guessed: 3 tokens right, amid siblings that are wrong."""
    tokens, parent, before = [last], [-1], 0
    for depth, token in enumerate(right):
        first = len(tokens)
        wrong = [(token + 1) % VOCABULARY, (token + 7) % VOCABULARY]
        siblings = [token, *wrong] if depth < 3 else wrong
        tokens += siblings
        parent += [before] * len(siblings)
        before = first
    return Tree(torch.tensor(tokens, device=DEVICE), parent)


def verify(model: Model, cached: Tensor, tree: Tree) -> list[int]:
    """The accepted tokens, and the one that the model adds by itself."""
    length, seen = len(cached), tree.ancestors()
    _, cache_k, cache_v = model.project(cached, torch.arange(length, device=DEVICE))
    depth = seen.sum(-1) - 1
    q, k, v = model.project(tree.tokens, length + depth)
    # Two calls: the cache, of which every node sees all, needs no mask.
    from_cache = single_prefill_with_kv_cache_return_lse(q, cache_k, cache_v)
    from_tree = single_prefill_with_kv_cache_return_lse(q, k, v, custom_mask=seen)
    attended, _ = merge_state(*from_cache, *from_tree)

    mask = torch.cat((torch.ones(len(q), length, dtype=torch.bool, device=DEVICE), seen), 1)
    every_k, every_v = torch.cat((cache_k, k)), torch.cat((cache_v, v))
    one_call = single_prefill_with_kv_cache(q, every_k, every_v, custom_mask=mask)
    torch.testing.assert_close(attended, one_call, rtol=2e-3, atol=2e-3)

    choices, tokens = model.choose(attended).tolist(), tree.tokens.tolist()
    accepted: list[int] = []
    nodes = [0]
    while nodes:
        chosen = choices[nodes[0]]
        accepted.append(chosen)
        nodes = [
            node
            for node, before in enumerate(tree.parent)
            if before == nodes[0] and tokens[node] == chosen
        ]
    return accepted


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    prompt = torch.randint(VOCABULARY, (PROMPT,)).to(DEVICE)
    right = decode(model, prompt, 4)
    # All but the last token are in the cache already.
    tree = draft(int(prompt[-1]), right)
    accepted = verify(model, prompt[:-1], tree)
    assert accepted == right, (accepted, right)
    print(
        f"{len(tree.parent) - 1} drafted tokens: {len(accepted) - 1} accepted and one more chosen, "
        f"as token by token: {accepted}"
    )


if __name__ == "__main__":
    main()
