"""The texts of every refusal: what was given, what is allowed, what to do.

Kept apart from the checks so that these read as a list of conditions and cost nothing while all is
well. Each function returns the exception; the caller raises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CAUSAL_WITH_MASK = (
    "causal=True has no effect because a custom mask is given: the mask alone decides. Pass "
    "causal=False, or AND the causal triangle into the mask, e.g. mask & "
    "torch.ones_like(mask).tril(kv_len - qo_len). (Said once.)"
)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _kind(value: object) -> str:
    """A value and its type, cut short: it may be a long list. A tensor's values are not read."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value)} and dtype {value.dtype}"
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"


def not_a_tensor(*named: tuple[str, Any]) -> TypeError:
    name, value = next((n, x) for n, x in named if not isinstance(x, Tensor))
    return TypeError(
        f"{name} is {_kind(value)}; expected a torch.Tensor. Convert it with torch.as_tensor(...)."
    )


def not_strided(*named: tuple[str, Tensor]) -> TypeError:
    name, value = next((n, x) for n, x in named if x.layout is not torch.strided)
    return TypeError(
        f"{name} has layout {value.layout}; expected a dense tensor, torch.strided. Convert it "
        f"with {name}.to_dense()."
    )


def memory_is_gone(name: str, value: Tensor, needed: int) -> ValueError:
    return ValueError(
        f"{name} of shape {_shape(value)} needs a storage of {needed} bytes, and its own has "
        f"{value.untyped_storage().nbytes()}: it was freed or made smaller, as FSDP does with "
        "sharded parameters. Make the call while the storage is there, or pass a copy."
    )


def unknown_word(name: str, value: object, allowed: Sequence[str]) -> TypeError | ValueError:
    words = ", ".join(repr(word) for word in allowed)
    if not isinstance(value, str):
        return TypeError(f"{name} is {_kind(value)}; expected a string, one of {words}.")
    return ValueError(
        f"{name}={value!r} is unknown; expected one of {words} (upper and lower case count)."
    )


def bad_lse_base(value: object) -> ValueError:
    given = _kind(value) if isinstance(value, Tensor) else repr(value)
    return ValueError(
        f"lse_base={given} is unknown; expected '2' (the default, as FlashInfer returns it) or "
        "'e' (natural logarithm, as torch.logsumexp)."
    )


def not_a_bool(name: str, value: object) -> TypeError:
    hint = " A mask goes to custom_mask." if name == "causal" else ""
    return TypeError(f"{name} is {_kind(value)}; expected True or False.{hint}")


def not_a_float(name: str, value: object) -> TypeError:
    if isinstance(value, Tensor):
        return TypeError(
            f"{name} is a tensor of shape {_shape(value)}; expected a float. Read it once with "
            f"{name}.item() outside the loop; scales that live on the device go to scale_q, "
            "scale_k, scale_v, k_scale or v_scale."
        )
    per_head = (
        " Values per head are a float32 torch.Tensor on q's device."
        if name in ("scale_q", "scale_k", "scale_v")
        else ""
    )
    return TypeError(f"{name} is {_kind(value)}; expected a float.{per_head}")


def float_too_large(name: str, value: object) -> ValueError:
    return ValueError(
        f"{name}, of type {type(value).__name__}, is too large for a float; expected at most about "
        "1.8e308 in size."
    )


def not_an_int(name: str, value: object) -> TypeError:
    return TypeError(f"{name} is {_kind(value)}; expected an int (negative = off).")


def not_positive(name: str, value: float) -> ValueError:
    return ValueError(
        f"{name}={value} is out of range; expected a finite float above 0, or None for the default."
    )


def bad_soft_cap(value: float) -> ValueError:
    return ValueError(
        f"logits_soft_cap={value} is not finite; expected a finite float above 0, or None (or 0 "
        "and below) for no cap."
    )


def not_three_dims(q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> ValueError:
    return ValueError(
        f"q, k, v have shapes {_shape(q)}, {_shape(k)}, {_shape(v)}; expected three dimensions "
        f"each: {_layout_text(kv_layout)}. There is no batch dimension: call once per request, or "
        "remove it with squeeze(0)."
    )


def _layout_text(kv_layout: str) -> str:
    kv = "kv_len, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, kv_len"
    return (
        f"q [qo_len, num_qo_heads, head_dim_qk], k [{kv}, head_dim_qk], v [{kv}, head_dim_vo] with "
        f"kv_layout={kv_layout!r}"
    )


def shapes_disagree(q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> ValueError:
    """`k` and `v` come NHD-shaped; the text shows them as the caller gave them."""
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    wrong = []
    if k.shape[2] != q.shape[2]:
        wrong.append(f"head_dim_qk is {q.shape[2]} in q and {k.shape[2]} in k")
    length, heads = (0, 1) if kv_layout == "NHD" else (1, 0)
    if k.shape[length] != v.shape[length]:
        wrong.append(f"kv_len is {k.shape[length]} in k and {v.shape[length]} in v")
    if k.shape[heads] != v.shape[heads]:
        wrong.append(f"num_kv_heads is {k.shape[heads]} in k and {v.shape[heads]} in v")
    other = "HND" if kv_layout == "NHD" else "NHD"
    return ValueError(
        f"{'; '.join(wrong)} (shapes {_shape(q)}, {_shape(k)}, {_shape(v)}); expected "
        f"{_layout_text(kv_layout)}. If k and v have the other layout, pass kv_layout={other!r}."
    )


def bad_head_dim(name: str, value: int, where: str) -> ValueError:
    if value <= 0:
        remedy = "Empty heads have no attention."
    elif value < 256:
        then = "cut the result" if where == "v" else "pass sm_scale=1/sqrt(the true size)"
        remedy = f"Pad the last dimension of {where} with zeros to {-(-value // 8) * 8} and {then}."
    else:
        remedy = (
            "Larger heads have no kernel: use torch.nn.functional.scaled_dot_product_attention."
        )
    return ValueError(
        f"{name}={value} is not supported; expected a multiple of 8 from 8 to 256. {remedy}"
    )


def bad_group(q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> ValueError:
    """`k` and `v` come NHD-shaped; the text shows them as the caller gave them."""
    num_qo_heads, num_kv_heads = q.shape[1], k.shape[1]
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    other = "HND" if kv_layout == "NHD" else "NHD"
    remedy = f"If k and v have the other layout, pass kv_layout={other!r}"
    if num_qo_heads > num_kv_heads > 0:
        remedy += "; if not, repeat the k and v heads"
    return ValueError(
        f"num_qo_heads={num_qo_heads} is not a multiple of num_kv_heads={num_kv_heads} (shapes "
        f"{_shape(q)}, {_shape(k)}, {_shape(v)}, read as {_layout_text(kv_layout)}); expected one, "
        f"because each key/value head serves the same number of query heads. {remedy}."
    )


def wrong_device(*named: tuple[str, Tensor], device: torch.device) -> ValueError:
    name, value = next((n, x) for n, x in named if x.device != device)
    return ValueError(
        f"{name} is on {value.device} and q is on {device}; expected every tensor on one device. "
        f"Move it with {name}.to({str(device)!r})."
    )


def bad_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype, *, all_foreign: bool) -> TypeError:
    """`all_foreign`: none of the three is a dtype that attention takes."""
    remedy = (
        "Cast all three with .half() or .bfloat16()."
        if all_foreign
        else "Cast the odd one with .to(dtype)."
    )
    return TypeError(
        f"q, k, v have dtypes {q}, {k}, {v}; expected all float16, all bfloat16, all float8 "
        "(float8_e4m3fn or float8_e5m2), or float16/bfloat16 q with float8 k and v. "
        f"{remedy}"
    )


def bad_output_dtype(value: object, allowed: Sequence[torch.dtype]) -> TypeError:
    names = ", ".join(str(dtype) for dtype in allowed)
    if not isinstance(value, torch.dtype):
        return TypeError(
            f"o_dtype is {_kind(value)}; expected a torch.dtype, one of {names}, or None."
        )
    return TypeError(
        f"o_dtype={value} is not supported; expected one of {names}, or None for the default."
    )


def fp16_reduction_dtype(q: torch.dtype, k: torch.dtype) -> ValueError:
    return ValueError(
        f"use_fp16_qk_reduction=True with q of {q} and k of {k}; it needs both in torch.float16, "
        "whose range the reduction has. Pass use_fp16_qk_reduction=False (the default; exact in "
        "float32)."
    )


def forward_only(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} requires grad, and this is a forward pass only: no backend computes gradients. "
        "Call it under torch.no_grad() or on .detach()ed tensors; to train use "
        "torch.nn.functional.scaled_dot_product_attention."
    )


def mask_not_bool(mask: Tensor) -> TypeError:
    packed = (
        " A packed uint8 mask goes to packed_custom_mask."
        if mask.dtype == torch.uint8
        else " An additive bias is not a mask: this function has none."
    )
    return TypeError(
        f"custom_mask has dtype {mask.dtype}; expected torch.bool, True = keep. Convert it, e.g. "
        f"mask != 0.{packed}"
    )


def bad_mask_shape(mask: Tensor, qo_len: int, kv_len: int) -> ValueError:
    shape = (qo_len, kv_len)
    if mask.numel() != qo_len * kv_len:
        remedy = "Slice or expand it to that shape."
    elif tuple(mask.shape) == (kv_len, qo_len):
        remedy = "Transpose it: custom_mask.T."
    else:
        remedy = f"Its elements are as many; if they lie row after row: custom_mask.reshape{shape}."
    return ValueError(
        f"custom_mask has shape {_shape(mask)}; expected [qo_len, kv_len] = {shape}: one mask for "
        f"all heads. {remedy}"
    )


def packed_mask_not_uint8(mask: Tensor) -> TypeError:
    return TypeError(
        f"packed_custom_mask has dtype {mask.dtype}; expected torch.uint8 from "
        "prefill.packbits(mask.flatten(), bitorder='little'). A bool mask goes to custom_mask."
    )


def bad_packed_mask_shape(mask: Tensor, qo_len: int, kv_len: int) -> ValueError:
    return ValueError(
        f"packed_custom_mask has shape {_shape(mask)}; expected ({(qo_len * kv_len + 7) // 8},): "
        f"ceil(qo_len * kv_len / 8) bytes for qo_len={qo_len}, kv_len={kv_len}, rows not padded. "
        "Pack the flat mask: prefill.packbits(mask.flatten(), bitorder='little')."
    )


def not_float32(name: str, value: Tensor) -> TypeError:
    return TypeError(
        f"{name} has dtype {value.dtype}; expected torch.float32. Convert it with {name}.float()."
    )


def bad_per_head(
    name: str, value: Tensor, heads: int, what: str, *, one_element: bool
) -> ValueError:
    also = ", one element, or a float" if one_element else ""
    return ValueError(
        f"{name} has shape {_shape(value)}; expected [{what}] = ({heads},){also}. Give one value "
        "per head."
    )


def not_one_element(name: str, value: Tensor) -> ValueError:
    per_head = "scale_k" if name == "k_scale" else "scale_v"
    return ValueError(
        f"{name} has shape {_shape(value)}; expected a float or a tensor of one element. Values "
        f"per head go to {per_head}."
    )


def no_effect(name: str, mode: str, given: str) -> ValueError:
    return ValueError(
        f"{name} given with pos_encoding_mode={given!r}, where it would have no effect; expected "
        f"pos_encoding_mode={mode!r}. Set the mode, or leave the argument out."
    )


def lse_without_return() -> ValueError:
    return ValueError(
        "lse= given with return_lse=False, where it would stay unwritten. Pass return_lse=True, or "
        "leave lse out."
    )


def bad_result_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> ValueError:
    dims = "[qo_len, num_qo_heads, head_dim_vo]" if name == "out" else "[qo_len, num_qo_heads]"
    return ValueError(
        f"{name} has shape {_shape(value)}; expected {dims} = {shape}. Allocate it with that "
        "shape, or leave it out."
    )


def bad_result_dtype(name: str, value: Tensor, dtype: torch.dtype) -> TypeError:
    remedy = f"Allocate it with dtype={dtype}" + (", or set o_dtype." if name == "out" else ".")
    return TypeError(f"{name} has dtype {value.dtype}; expected {dtype}. {remedy}")


def result_overlaps_itself(name: str, value: Tensor) -> ValueError:
    return ValueError(
        f"{name} has shape {_shape(value)} and strides {value.stride()}: several of its elements "
        "share memory, or its dimensions interleave; expected each dimension to step over those of "
        "smaller stride. Allocate it instead of expanding it."
    )


def not_float8(dtype: object, allowed: Sequence[torch.dtype]) -> TypeError:
    names = " or ".join(str(each) for each in allowed)
    given = str(dtype) if isinstance(dtype, torch.dtype) else _kind(dtype)
    return TypeError(
        f"dtype is {given}; expected {names}. Other dtypes need no scales: cast with .to(dtype)."
    )


def not_heads(x: Tensor, kv_layout: str) -> ValueError:
    dims = "length, heads" if kv_layout == "NHD" else "heads, length"
    return ValueError(
        f"x has shape {_shape(x)}; expected three dimensions, [{dims}, head_dim] with "
        f"kv_layout={kv_layout!r}. There is no batch dimension: call once per request, or remove "
        "it with squeeze(0)."
    )


def not_quantizable(dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> TypeError:
    names = ", ".join(str(each) for each in allowed)
    return TypeError(
        f"x has dtype {dtype}; expected one of {names}. Convert it with .float(); a float8 tensor "
        "is quantised already and needs its own scale."
    )


def no_gradient_of_rounding(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} requires grad, and rounding to float8 has no gradient. Call it under "
        f"torch.no_grad() or on {name}.detach()."
    )
