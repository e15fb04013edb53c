"""`python -m prefill explain`: what a call would do, told without its tensors or its device."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import torch
from torch import Tensor

from prefill import support
from prefill.devices import DEVICES, device_info_of
from prefill.explain import Explanation, explain_request
from prefill.request import (
    BACKENDS,
    FP8_DTYPES,
    HALF_DTYPES,
    KV_LAYOUTS,
    OUTPUT_DTYPES,
    POS_ENCODING_MODES,
    make_request,
)

DTYPES = tuple(support.dtype_name(dtype) for dtype in HALF_DTYPES + FP8_DTYPES)
O_DTYPES = tuple(support.dtype_name(dtype) for dtype in OUTPUT_DTYPES)
MAX_LENGTH, MAX_NUMBER = 1 << 31, 1 << 14
"""Of rows or keys, and of heads or a head's elements: torch counts a tensor's bytes in 63 bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The call's arguments as options; what is left out has the function's default."""
    parser.add_argument("--qo-len", type=_length, required=True, help="query rows")
    parser.add_argument("--kv-len", type=_length, required=True, help="keys")
    parser.add_argument(
        "--heads", type=_pair, default=(32, 8), help="query/key heads (default: 32/8)"
    )
    parser.add_argument(
        "--head-dim", type=_pair, default=(128, 128), help="128, or 192/128 for q and k / v"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of q (bfloat16)")
    parser.add_argument("--kv-dtype", choices=DTYPES, help="of k and v (that of q)")
    parser.add_argument("--o-dtype", choices=O_DTYPES, help="of the output")
    parser.add_argument("--causal", action="store_true", help="the last row at the last key")
    parser.add_argument(
        "--window-left", type=int, default=-1, help="keys before a row that it sees (-1: all)"
    )
    parser.add_argument("--mask", choices=("bool", "packed"), help="a custom mask, bool or of bits")
    parser.add_argument("--logits-soft-cap", type=float, help="c of c * tanh(logit / c)")
    parser.add_argument(
        "--pos-encoding-mode", choices=POS_ENCODING_MODES, default="NONE", help="(NONE)"
    )
    parser.add_argument("--sinks", action="store_true", help="a logit per head that has no value")
    parser.add_argument("--kv-layout", choices=KV_LAYOUTS, default="NHD", help="of k and v (NHD)")
    parser.add_argument("--use-fp16-qk-reduction", action="store_true", help="float16 alone")
    parser.add_argument("--return-lse", action="store_true", help="the log-sum-exp as well")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="insist on one (auto)")
    parser.add_argument(
        "--device",
        help=f"the device to pretend: {', '.join(DEVICES)}, sm_86, cpu; or one that is here, as "
        "cuda or cuda:1 (default: cuda where there is one, else cpu); the kernels are those "
        "of this build",
    )


def run(options: argparse.Namespace) -> int:
    """Print the explanation; 0, or 1 where the call would be refused, 2 where it is no call."""
    try:
        explanation = explained(options)
    except (TypeError, ValueError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 2
    print(explanation)
    return 0 if explanation.backend is not None else 1


def explained(options: argparse.Namespace) -> Explanation:
    """What `prefill.explain` says of such a call; ValueError for a device that nobody knows."""
    device = device_info_of(options.device)
    q, k, v = _tensors(options)
    qo_len, kv_len = options.qo_len, options.kv_len
    arguments: dict[str, Any] = {
        name: getattr(options, name)
        for name in (
            "causal",
            "window_left",
            "logits_soft_cap",
            "pos_encoding_mode",
            "kv_layout",
            "use_fp16_qk_reduction",
            "return_lse",
            "backend",
        )
    }
    if options.o_dtype is not None:
        arguments["o_dtype"] = getattr(torch, options.o_dtype)
    if options.mask == "bool":
        arguments["custom_mask"] = torch.empty(qo_len, kv_len, dtype=torch.bool, device="meta")
    elif options.mask == "packed":
        size = (qo_len * kv_len + 7) // 8
        arguments["packed_custom_mask"] = torch.empty(size, dtype=torch.uint8, device="meta")
    if options.sinks:
        arguments["sinks"] = torch.empty(options.heads[0], device="meta")
    request = make_request(q, k, v, **arguments)
    return explain_request(request, device)


def _tensors(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v without memory: aligned and dense, as explain would have to see for copies."""
    (heads, kv_heads), (dim_qk, dim_vo) = options.heads, options.head_dim
    dtype = getattr(torch, options.dtype)
    kv_dtype = dtype if options.kv_dtype is None else getattr(torch, options.kv_dtype)
    outer = (options.kv_len, kv_heads)
    if options.kv_layout == "HND":
        outer = outer[::-1]
    return (
        torch.empty(options.qo_len, heads, dim_qk, dtype=dtype, device="meta"),
        torch.empty(*outer, dim_qk, dtype=kv_dtype, device="meta"),
        torch.empty(*outer, dim_vo, dtype=kv_dtype, device="meta"),
    )


def _pair(text: str) -> tuple[int, int]:
    """'32/8' -> (32, 8); '128' -> (128, 128)."""
    match = re.fullmatch(r"(\d+)(?:/(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or two as 32/8")
    first, second = match[1], match[2] or match[1]
    return _at_most(MAX_NUMBER, first), _at_most(MAX_NUMBER, second)


def _length(text: str) -> int:
    if re.fullmatch(r"\d+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of tokens, 0 or more")
    return _at_most(MAX_LENGTH, text)


def _at_most(limit: int, digits: str) -> int:
    # Python itself refuses to read thousands of digits.
    if len(digits) > 18 or int(digits) > limit:
        raise argparse.ArgumentTypeError(f"{digits}: expected at most {limit}")
    return int(digits)
