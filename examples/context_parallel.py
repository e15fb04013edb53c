"""Context parallelism: one sequence over several processes, keys and values going round a ring.

Each process holds a part of the sequence: its rows, and their keys and values. In every step it
attends to the part of the keys that it has just got, and passes that on to its neighbour. A part
before its own is seen whole, its own is causal, one after it is not seen at all. What comes of each
step is a partial result with its LSE; at the end `merge_states` makes them one.

Run it: python examples/context_parallel.py
or, with as many processes as you like: torchrun --nproc-per-node 2 examples/context_parallel.py
(With a GPU for each process they use NCCL, else the CPU and gloo.)
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from prefill import (
    merge_states,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

PROCESSES = 2  # where torchrun does not say
PART = 96
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64


def sequence(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the whole sequence, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, heads, HEAD_DIM, generator=generator).to(device, torch.float16)
        for heads in (NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    return q, k, v


def pass_on(kv: Tensor, rank: int, processes: int) -> Tensor:
    """Give these keys and values to the next process, and take the previous one's."""
    received = torch.empty_like(kv)
    there = dist.P2POp(dist.isend, kv, (rank + 1) % processes)
    back = dist.P2POp(dist.irecv, received, (rank - 1) % processes)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()
    return received


def ring_attention(q: Tensor, k: Tensor, v: Tensor, rank: int, processes: int) -> Tensor:
    """Causal attention of this process's rows over all keys before them."""
    kv = torch.stack((k, v))
    states = []
    for step in range(processes):
        owner = (rank - step) % processes
        if owner <= rank:
            states.append(
                single_prefill_with_kv_cache_return_lse(q, kv[0], kv[1], causal=owner == rank)
            )
        if step < processes - 1:
            kv = pass_on(kv, rank, processes)
    outs, lses = zip(*states, strict=True)
    return merge_states(torch.stack(outs, 1), torch.stack(lses, 1))[0]


def work(rank: int, processes: int, meeting_point: str) -> None:
    """One process: its part of the sequence, and the comparison with one call over all of it."""
    use_gpus = torch.cuda.device_count() >= processes and dist.is_nccl_available()
    device = torch.device("cuda", rank) if use_gpus else torch.device("cpu")
    transport = "nccl" if use_gpus else "gloo"
    if use_gpus:
        torch.cuda.set_device(device)  # nothing of this process belongs on the first GPU
    dist.init_process_group(
        transport,
        meeting_point,
        rank=rank,
        world_size=processes,
        device_id=device if use_gpus else None,
    )
    try:
        q, k, v = sequence(processes * PART, device)
        own = slice(rank * PART, (rank + 1) * PART)
        out = ring_attention(q[own], k[own], v[own], rank, processes)
        whole = single_prefill_with_kv_cache(q, k, v, causal=True)[own]
        torch.testing.assert_close(out, whole, rtol=2e-3, atol=2e-3)
        error = (out - whole).abs().max()
        dist.reduce(error, 0, dist.ReduceOp.MAX)
        if rank == 0:
            print(
                f"{processes} processes over {transport}, {PART} rows each: largest difference "
                f"from one call {error.item():.1e}"
            )
    finally:
        dist.destroy_process_group()


def main() -> None:
    if dist.is_torchelastic_launched():  # torchrun: this is one of the processes
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (PROCESSES, f"file://{folder}/store"), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
