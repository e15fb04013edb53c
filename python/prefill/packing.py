"""Bit packing of masks, and the way back.

`packbits` and `segment_packbits` follow numpy.packbits; `packed_custom_mask` takes what
`packbits(mask, bitorder="little")` returns. All bit offsets are 64-bit, and temporaries are bounded
whatever the number of bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of packed result that are made at a time.
_BLOCK_BYTES = 1 << 22

_INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INDEX_DTYPES = (torch.int32, torch.int64)


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Pack the elements of `x` (nonzero = 1) into bits, as numpy.packbits does.

    Returns uint8 `[ceil(x.numel() / 8)]`. `x` is bool or integer and is read in row-major order,
    whatever its shape. Element i goes to byte i // 8, and there to bit i % 8 counted from the
    lowest bit with `bitorder="little"`, from the highest with `"big"`. Bits past the end are 0.
    Nothing is synchronised with the host.

    Attention takes little-endian masks: `packed_custom_mask=packbits(mask, bitorder="little")`.
    """
    _check_bits(x, "packbits")
    shifts = _shifts(bitorder)
    bits = x.reshape(-1)
    count = bits.numel()
    packed = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x.device)
    for start in range(0, packed.numel(), _BLOCK_BYTES):
        stop = min(start + _BLOCK_BYTES, packed.numel())
        block = bits[8 * start : 8 * stop] != 0
        if block.numel() < 8 * (stop - start):
            block = torch.nn.functional.pad(block, (0, 8 * (stop - start) - block.numel()))
        packed[start:stop] = _join_bits(block.view(-1, 8), shifts)
    return packed


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack each segment `x[indptr[i]:indptr[i + 1]]` by itself, each padded to whole bytes.

    `x` is 1-D, bool or integer, of `indptr[-1]` elements; `indptr` is int32 or int64 `[segments +
    1]`, starts at 0 and never falls. Returns the packed bytes and the new indptr (dtype and device
    of `indptr`), which grows by `ceil(length / 8)` per segment.

    The length of the result depends on the values in `indptr`: a CUDA `indptr` is read back once,
    an `indptr` on the CPU needs no synchronisation even for CUDA `x`.
    """
    _check_bits(x, "segment_packbits")
    if x.dim() != 1:
        raise ValueError(
            f"segment_packbits: x must be 1-D, got shape {tuple(x.shape)}; flatten it first"
        )
    shifts = _shifts(bitorder)
    if not isinstance(indptr, Tensor) or indptr.dtype not in _INDEX_DTYPES:
        given = indptr.dtype if isinstance(indptr, Tensor) else type(indptr).__name__
        raise TypeError(
            f"segment_packbits: indptr must be an int32 or int64 tensor, got {given}; make it with "
            "torch.as_tensor(indptr, dtype=torch.int64)"
        )
    if indptr.dim() != 1 or indptr.numel() == 0:
        raise ValueError(
            "segment_packbits: indptr must be 1-D with one more element than segments, "
            f"got shape {tuple(indptr.shape)}; for no segments pass [0]"
        )
    bounds = indptr.to("cpu", torch.int64)
    lengths = bounds.diff()
    if int(bounds[0]) != 0 or int(bounds[-1]) != x.numel() or bool((lengths < 0).any()):
        raise ValueError(
            "segment_packbits: indptr must start at 0, never fall and end at x's number of "
            f"elements, {x.numel()}; got first {int(bounds[0])}, last {int(bounds[-1])}, "
            f"smallest step {int(lengths.min()) if lengths.numel() else 0}; make it of the "
            "segments' lengths: a 0, then lengths.cumsum(0)"
        )
    packed_bounds = torch.zeros_like(bounds)
    packed_bounds[1:] = ((lengths + 7) // 8).cumsum(0)

    total = int(packed_bounds[-1])
    packed = torch.empty(total, dtype=torch.uint8, device=x.device)
    first_bit, last_bit = bounds[:-1].to(x.device), bounds[1:].to(x.device)
    first_byte, last_byte = packed_bounds[:-1].to(x.device), packed_bounds[1:].to(x.device)
    lanes = torch.arange(8, device=x.device)
    # A byte costs eight 64-bit indices here, hence smaller blocks than packbits takes.
    block_bytes = _BLOCK_BYTES // 8
    for start in range(0, total, block_bytes):
        index = torch.arange(start, min(start + block_bytes, total), device=x.device)
        segment = torch.searchsorted(last_byte, index, right=True)
        source = (first_bit[segment] + 8 * (index - first_byte[segment]))[:, None] + lanes
        inside = source < last_bit[segment][:, None]
        bits = (x[source.clamp_(max=x.numel() - 1)] != 0) & inside
        packed[start : start + index.numel()] = _join_bits(bits, shifts)
    return packed, packed_bounds.to(indptr.device, indptr.dtype)


def mask_bit_offset(row: Tensor, key: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """Return the byte and the bit in it, from the lowest, of mask element (row, key).

    That is bit `row * kv_len + key`. `row` and `key` are int64 and broadcast; 46,341 rows of 46,341
    keys already pass 2^31 bits.
    """
    bit = row * kv_len + key
    return bit >> 3, bit & 7


def unpack_mask_block(
    packed: Tensor, rows: tuple[int, int], keys: tuple[int, int], kv_len: int
) -> Tensor:
    """Return rows `rows[0]..rows[1]`, keys `keys[0]..keys[1]` (ends excluded) of a packed mask.

    Bool, True = keep. `packed` is flat, little-endian and without padding between rows. Only the
    bits of the block are read.
    """
    row = torch.arange(rows[0], rows[1], dtype=torch.int64, device=packed.device)[:, None]
    key = torch.arange(keys[0], keys[1], dtype=torch.int64, device=packed.device)[None, :]
    byte, bit = mask_bit_offset(row, key, kv_len)
    return ((packed[byte] >> bit.to(torch.uint8)) & 1).to(torch.bool)


def _check_bits(x: Tensor, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: x must be a torch.Tensor, got {type(x).__name__}; convert it with "
            "torch.as_tensor(x)"
        )
    if x.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{name}: x must be bool or integer, got {x.dtype}; pass `x != 0`")


def _shifts(bitorder: str) -> range:
    """Return the shift of each of a byte's eight elements."""
    if bitorder == "little":
        return range(8)
    if bitorder == "big":
        return range(7, -1, -1)
    raise ValueError(
        f"bitorder must be 'big' or 'little', got {bitorder!r}; pass 'little' for attention's masks"
    )


def _join_bits(bits: Tensor, shifts: range) -> Tensor:
    """Join bool `[bytes, 8]` to uint8 `[bytes]`."""
    lanes = bits.view(torch.uint8)
    packed = lanes[:, 0] << shifts[0]
    for lane in range(1, 8):
        packed |= lanes[:, lane] << shifts[lane]
    return packed
