"""Which backend answers, on devices and builds that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefill
from fakes import cuda, library, pretend
from prefill import support
from prefill.backends import PRIORITY, resolve
from prefill.request import PrefillRequest, make_request
from prefill.support import BuildInfo, DeviceInfo, NativeLibrary, arch_runs_on

CPU = DeviceInfo("cpu")
H100 = cuda(9, 0)
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def request(
    head_dim_qk: int = 64,
    head_dim_vo: int | None = None,
    dtype: torch.dtype = torch.float16,
    **kwargs: Any,
) -> PrefillRequest:
    vo = head_dim_qk if head_dim_vo is None else head_dim_vo
    shapes = ((2, 4, head_dim_qk), (3, 2, head_dim_qk), (3, 2, vo))
    return make_request(*(torch.zeros(shape).to(dtype) for shape in shapes), **kwargs)


@pytest.fixture
def full_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", library())


def reasons(name: str, call: PrefillRequest, device: DeviceInfo) -> list[str]:
    return {b.name: b for b in PRIORITY}[name].unsupported_reasons(call, device)


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize(
    ("capability", "chosen", "fa2", "fa3"),
    [
        ((7, 5), "reference", False, False),
        ((8, 0), "fa2", True, False),
        ((8, 6), "fa2", True, False),
        ((8, 9), "fa2", True, False),
        ((9, 0), "fa3", True, True),
        ((10, 0), "fa2", True, False),
        ((12, 0), "fa2", True, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_auto_by_device(
    capability: tuple[int, int], chosen: str, fa2: bool, fa3: bool, dtype: torch.dtype
) -> None:
    device = cuda(*capability)
    assert resolve(request(dtype=dtype), device) == chosen
    for name, able in (("fa2", fa2), ("fa3", fa3), ("reference", True)):
        forced = request(dtype=dtype, backend=name)
        if able:
            assert resolve(forced, device) == name
            continue
        with pytest.raises(NotImplementedError) as caught:
            resolve(forced, device)
        text = str(caught.value)
        assert f"backend={name!r} cannot run this call" in text
        assert f"compute capability {capability[0]}.{capability[1]}" in text
        assert "backend='reference'" in text
        assert f"backend='auto' takes {chosen!r}" in text


@pytest.mark.parametrize(
    ("arch", "runs_on"),
    [
        ("80-real", {(8, 0), (8, 6), (8, 9)}),
        ("86-real", {(8, 6), (8, 9)}),
        ("90-real", {(9, 0)}),
        ("90a-real", {(9, 0)}),
        ("80-virtual", {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}),
        ("90-virtual", {(9, 0), (10, 0), (12, 0)}),
        ("80", {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}),
        ("100f-real", {(10, 0)}),
        ("120-real", {(12, 0)}),
    ],
)
def test_arch_runs_on(arch: str, runs_on: set[tuple[int, int]]) -> None:
    devices = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert {device for device in devices if arch_runs_on(arch, device)} == runs_on


@pytest.mark.usefixtures("full_build")
def test_cpu_takes_the_reference() -> None:
    assert resolve(request(), CPU) == "reference"
    with pytest.raises(
        NotImplementedError, match=r"fa2 needs a CUDA device.* on cpu.*backend='reference' can"
    ):
        resolve(request(backend="fa2"), CPU)


def long_request(**kwargs: Any) -> PrefillRequest:
    """More keys than kernels count, in no memory."""
    k = torch.empty(1, 1, 8, dtype=torch.float16).expand(1 << 30, 1, 8)
    return make_request(torch.zeros(1, 1, 8, dtype=torch.float16), k, k, **kwargs)


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_what_the_kernels_lack_goes_to_the_reference(backend: str) -> None:
    assert resolve(long_request(), H100) == "reference"
    [reason] = reasons(backend, long_request(), H100)
    assert "2^30" in reason
    with pytest.raises(NotImplementedError, match="backend='reference' can"):
        resolve(long_request(backend=backend), H100)


KERNEL_DTYPES = [
    (torch.float16, None, "float16"),
    (torch.float16, torch.bfloat16, "float16"),
    (torch.bfloat16, torch.float16, "bfloat16"),
    (torch.bfloat16, torch.float32, "bfloat16"),
    *((dtype, None, "bfloat16") for dtype in FP8),
    *((dtype, torch.bfloat16, "bfloat16") for dtype in FP8),
    *((dtype, torch.float16, "float16") for dtype in FP8),
    *((dtype, torch.float32, "float16") for dtype in FP8),
]


@pytest.mark.parametrize(("dtype", "o_dtype", "kernel"), KERNEL_DTYPES)
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_every_output_of_every_query(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    dtype: torch.dtype,
    o_dtype: torch.dtype | None,
    kernel: str,
) -> None:
    """The kernel of that dtype is enough, and without it there is none."""
    call = request(dtype=dtype, o_dtype=o_dtype, backend=backend)
    monkeypatch.setattr(support, "_native", library(dtypes=(kernel,)))
    assert resolve(call, H100) == backend
    [other] = {"float16", "bfloat16"} - {kernel}
    monkeypatch.setattr(support, "_native", library(dtypes=(other,)))
    [reason] = reasons(backend, call, H100)
    assert reason == f"{kernel} is not in this build of {backend}, which has {other}"


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize("k", FP8)
@pytest.mark.parametrize("v", FP8)
@pytest.mark.parametrize("q", FP8)
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_float8_dtypes_may_differ(
    backend: str, q: torch.dtype, k: torch.dtype, v: torch.dtype
) -> None:
    shapes = ((2, 4, 72), (3, 2, 72), (3, 2, 40))
    tensors = (torch.zeros(s).to(d) for s, d in zip(shapes, (q, k, v), strict=True))
    call = make_request(*tensors, pos_encoding_mode="ROPE_LLAMA", backend=backend)
    assert resolve(call, H100) == backend


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_fp16_reduction_leaves_the_choice_to_the_backend(backend: str) -> None:
    assert resolve(request(use_fp16_qk_reduction=True, backend=backend), H100) == backend


@pytest.mark.usefixtures("full_build")
def test_all_reasons_are_given_at_once() -> None:
    call = long_request(backend="fa3")
    found = reasons("fa3", call, cuda(8, 0))
    assert len(found) == 2
    with pytest.raises(NotImplementedError) as caught:
        resolve(call, cuda(8, 0))
    for reason in found:
        assert reason in str(caught.value)


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": True},
        {"custom_mask": torch.ones(2, 3, dtype=torch.bool)},
        {"packed_custom_mask": torch.ones(1, dtype=torch.uint8)},
    ],
)
@pytest.mark.parametrize("alibi_slopes", [None, torch.ones(4)])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_what_the_kernels_take(
    backend: str, alibi_slopes: torch.Tensor | None, mask: dict[str, Any]
) -> None:
    call = request(
        **mask,
        window_left=1,
        logits_soft_cap=30.0,
        pos_encoding_mode="ALIBI",
        alibi_slopes=alibi_slopes,
        sinks=torch.zeros(4),
        sm_scale=-1.0,
        scale_q=torch.ones(4),
        scale_k=2.0,
        v_scale=torch.ones(()),
        return_lse=True,
        lse_base="e",
        backend=backend,
    )
    assert reasons(backend, call, H100) == []
    assert resolve(call, H100) == backend


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize("k", FP8)
@pytest.mark.parametrize("v", FP8)
@pytest.mark.parametrize("q", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_fp8_keys_of_a_16_bit_query(
    backend: str, q: torch.dtype, k: torch.dtype, v: torch.dtype
) -> None:
    tensors = (torch.zeros(2, 4, 64, dtype=q), torch.zeros(3, 2, 64), torch.zeros(3, 2, 64))
    call = make_request(
        *(tensor.to(dtype) for tensor, dtype in zip(tensors, (q, k, v), strict=True)),
        pos_encoding_mode="ROPE_LLAMA",
        scale_k=torch.ones(2),
        v_scale=0.5,
        backend=backend,
    )
    assert call.o_dtype == q
    assert reasons(backend, call, H100) == []
    assert resolve(call, H100) == backend


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize(
    ("heads", "kernel"),
    [
        ((8, 8), "64x64"),
        ((64, 64), "64x64"),
        ((72, 64), "128x128"),
        ((64, 128), "128x128"),
        ((128, 64), "128x128"),
        ((136, 8), "192x128"),
        ((192, 128), "192x128"),
        ((192, 136), "256x256"),
        ((200, 8), "256x256"),
        ((8, 256), "256x256"),
        ((256, 256), "256x256"),
    ],
)
def test_head_dims_take_the_smallest_class(heads: tuple[int, int], kernel: str) -> None:
    assert resolve(request(*heads), H100) == "fa3"
    found = support.find_kernel(support.native().build or BuildInfo(), "fa2", "float16", *heads)
    assert found is not None
    assert found.name == f"fa2_float16_{kernel}"


def test_trimmed_head_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", library(classes=((64, 64), (192, 128))))
    assert resolve(request(128), H100) == "fa3"
    [reason] = reasons("fa3", request(256), H100)
    assert "head_dim_qk=256 with head_dim_vo=256" in reason
    assert "not in this build" in reason or "build of fa3, which has 64/64, 192/128" in reason


def test_trimmed_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", library(dtypes=("bfloat16",)))
    assert resolve(request(dtype=torch.bfloat16), H100) == "fa3"
    assert resolve(request(), H100) == "reference"
    [reason] = reasons("fa2", request(), H100)
    assert reason == "float16 is not in this build of fa2, which has bfloat16"


def test_trimmed_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", library(archs={"fa2": ["80-real"]}))
    [reason] = reasons("fa3", request(), H100)
    assert reason == "fa3 is not in this build, which has fa2"
    [reason] = reasons("fa2", request(), H100)
    assert reason == "the device has compute capability 9.0; this build's fa2 is for 80-real"
    assert resolve(request(), H100) == "reference"
    assert resolve(request(), cuda(8, 6)) == "fa2"


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", library(smem_bytes=131072))
    assert resolve(request(), cuda(8, 0, 166912)) == "fa2"
    [reason] = reasons("fa2", request(), cuda(8, 6, 101376))
    assert "131072 bytes of shared memory" in reason
    assert "101376" in reason


@pytest.mark.usefixtures("full_build")
@pytest.mark.parametrize("version", [0, 13000, 13020, 14000])
def test_driver_that_serves_the_build(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    monkeypatch.setattr(support, "driver_version", lambda: version)
    assert resolve(request(), H100) == "fa3"


@pytest.mark.usefixtures("full_build")
def test_driver_older_than_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "driver_version", lambda: 12040)
    assert resolve(request(), H100) == "reference"
    for backend in ("fa2", "fa3"):
        [reason] = reasons(backend, request(), H100)
        assert reason == (
            "the driver serves CUDA 12.4 and this build needs 13.x: update the driver, or rebuild "
            "with an older CUDA toolkit"
        )


def test_driver_is_asked_once_and_unknown_without_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Library:
        @staticmethod
        def driver_version() -> int:
            asked.append(1)
            return 12080

    support.driver_version.cache_clear()
    try:
        monkeypatch.setattr(support.torch.ops, "prefill", Library)
        assert [support.driver_version() for _ in range(3)] == [12080] * 3
        assert asked == [1]
        assert support.cuda_text(12080) == "12.8"
        support.driver_version.cache_clear()
        monkeypatch.setattr(support.torch.ops, "prefill", object())
        assert support.driver_version() == 0
    finally:
        support.driver_version.cache_clear()


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", NativeLibrary(None, support.NO_LIBRARY))
    assert resolve(request(), H100) == "reference"
    with pytest.raises(NotImplementedError, match=r"no compiled kernels.*PREFILL_KERNELS=ON.*nvcc"):
        resolve(request(backend="fa2"), H100)


def test_unloadable_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / support.LIBRARY_NAME).write_bytes(b"not a library")
    monkeypatch.setattr(support.importlib.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(support.torch.ops, "prefill", object())
    found = support.load_native()
    assert found.build is None
    assert "do not load with torch" in found.missing
    assert "file too short" in found.missing  # the loader's own reason
    assert found.missing.endswith("build the package on this machine (docs/building.md)")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    found = support.load_native()
    assert "with torch 2.9.1+cu128: " in found.missing
    assert found.missing.endswith("the package needs torch 2.10 or later: update torch")


def test_explain_native(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda(9, 0))
    q = torch.randn(2, 4, 80).half()
    kv = torch.randn(3, 2, 80).half()
    told = prefill.explain(q, kv, kv, causal=True)
    assert told.backend == "fa3"
    assert told.kernel == "fa3_float16_128x128"
    assert told.tile == (128, 128)
    assert told.num_splits == 1
    assert told.copies == ()
    assert told.rejected == {}
    assert "first in priority" in told.reason
    assert "Fake GPU sm_90" in told.device
    text = str(told)
    assert "backend: fa3" in text
    assert "tile 128 x 128, splits: 1" in text

    told = prefill.explain(q, kv, kv, backend="fa2")
    assert told.backend == "fa2"
    assert told.reason == "named by the caller"
    assert told.kernel == "fa2_float16_128x128"


def test_explain_tells_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    q = torch.randn(64, 4, 2).half().transpose(0, 2)
    k = torch.randn(3, 2, 65).half()[..., :64]
    v = torch.randn(3 * 2 * 64 + 1).half()[1:].view(3, 2, 64)
    out = torch.empty(2, 4, 68).half()[..., :64]
    told = prefill.explain(q, k, v, out=out)
    assert told.copies == (
        "q: the last dimension has stride 8, not 1",
        "k: strides (130, 65) are not multiples of 8 elements",
        "v: its address is not a multiple of 16 bytes",
        "out: strides (272, 68) are not multiples of 8 elements",
    )
    assert "copy:    q: the last dimension has stride 8" in str(told)

    q, kv = torch.randn(2, 4, 64).half(), torch.randn(9, 2, 64).half()
    keep = torch.ones(9, 18) > 0
    for mask, copies in (
        (keep[:2, :9], ()),
        (keep[:2, 1:10], ()),
        (keep[:1, :9].expand(2, 9), ()),
        (keep[:2, ::2], ("custom_mask: its last dimension has stride 2, not 1",)),
        (keep[:, :2].t(), ("custom_mask: its last dimension has stride 18, not 1",)),
    ):
        assert prefill.explain(q, kv, kv, custom_mask=mask).copies == copies
    assert prefill.explain(q, kv[:1], kv[:1], custom_mask=keep[:2, ::18]).copies == ()
    packed = torch.zeros(6, dtype=torch.uint8)
    for mask, copies in (
        (packed[:3], ()),
        (packed[1:4], ()),
        (packed[::2], ("packed_custom_mask: its last dimension has stride 2, not 1",)),
    ):
        assert prefill.explain(q, kv, kv, packed_custom_mask=mask).copies == copies


def test_explain_tells_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    q, kv = torch.randn(2, 4, 64).half(), torch.randn(9, 2, 64).half()
    small, wide = kv.to(torch.float8_e4m3fn), kv.to(torch.float8_e5m2)
    rope: dict[str, Any] = {"pos_encoding_mode": "ROPE_LLAMA"}
    assert prefill.explain(q, kv, kv).passes == ()
    assert prefill.explain(q, kv, kv, **rope).passes == ("q: rotated", "k: rotated")
    assert prefill.explain(q, kv, kv, **rope, backend="reference").passes == ()
    assert prefill.explain(q, kv[:0], kv[:0], **rope).passes == ()
    assert prefill.explain(q, small, wide).passes == (
        "k: widened from float8_e4m3fn to float16",
        "v: widened from float8_e5m2 to float16",
    )
    told = prefill.explain(q.bfloat16(), small, small, **rope)
    assert told.copies == ()
    assert told.passes == (
        "q: rotated",
        "k: widened from float8_e4m3fn to bfloat16 and rotated",
        "v: widened from float8_e4m3fn to bfloat16",
    )
    assert "pass:    v: widened from float8_e4m3fn to bfloat16" in str(told)

    parts = "by way of parts in float32"
    assert prefill.explain(q, kv, kv, o_dtype=torch.float32).passes == (f"out: float32 {parts}",)
    assert prefill.explain(q, kv, kv, o_dtype=torch.float16).passes == ()
    small_q = q.to(torch.float8_e5m2)
    told = prefill.explain(small_q, small, small)
    assert (told.kernel, told.dtype) == ("fa3_bfloat16_64x64", "bfloat16")
    assert told.passes == (
        "q: widened from float8_e5m2 to bfloat16",
        "k: widened from float8_e4m3fn to bfloat16",
        "v: widened from float8_e4m3fn to bfloat16",
    )
    told = prefill.explain(small_q, small, small, o_dtype=torch.float32, **rope)
    assert told.kernel == "fa3_float16_64x64"
    assert told.passes == (
        "q: widened from float8_e5m2 to float16 and rotated in float8_e5m2",
        "k: widened from float8_e4m3fn to float16 and rotated in float8_e5m2",
        "v: widened from float8_e4m3fn to float16",
        f"out: float32 {parts}",
    )


def test_explain_tells_of_float8_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    q, kv = (torch.randn(n, 4, 128).to(torch.float8_e4m3fn) for n in (2, 9))
    told = prefill.explain(q, kv, kv)
    assert (told.kernel, told.dtype) == ("fa3_float8_e4m3fn_128x128", "float8_e4m3fn")
    assert told.passes == ("v: transposed",)
    assert "pass:    v: transposed" in str(told)
    for o_dtype in ("float16", "float32"):
        told = prefill.explain(q, kv, kv, o_dtype=getattr(torch, o_dtype))
        assert told.kernel == "fa3_float8_e4m3fn_128x128"
        assert told.passes == ("v: transposed", f"out: {o_dtype} by way of parts in float32")
    told = prefill.explain(q, kv, kv, backend="fa2")
    assert (told.kernel, told.dtype) == ("fa2_bfloat16_128x128", "bfloat16")
    assert told.passes[2] == "v: widened from float8_e4m3fn to bfloat16"
    assert prefill.explain(q, kv, kv, backend="reference").dtype is None
    assert prefill.explain(q, kv[:0], kv[:0]).dtype is None


def test_explain_rejections(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = pretend(monkeypatch, cuda(8, 6))
    q = torch.randn(2, 4, 64).half()
    told = prefill.explain(q, q, q)
    assert told.backend == "fa2"
    assert told.reason == "auto: first in priority that can; fa3 cannot"
    assert "compute capability 8.6" in told.rejected["fa3"][0]

    long = q[:1, :1, :8].expand(1 << 30, 1, 8)
    told = prefill.explain(q[:, :1, :8], long, long)
    assert told.backend == "reference"
    assert told.kernel is None
    assert [len(r) for r in told.rejected.values()] == [2, 1]

    told = prefill.explain(q, q, q, backend="fa3")
    assert told.backend is None
    assert "backend='auto' takes 'fa2'" in told.reason
    assert "backend: none" in str(told)

    told = prefill.explain(q[:0], q, q)
    assert told.backend == "fa2"
    assert told.num_splits == 0
    assert "nothing is launched" in told.reason
    assert stub.calls == []


def test_explain_and_the_call_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (cuda(8, 0), cuda(9, 0)):
        stub = pretend(monkeypatch, device)
        q = torch.randn(2, 4, 64).half()
        prefill.single_prefill_with_kv_cache(q, q, q)
        assert [c["backend"] for c in stub.calls] == [prefill.explain(q, q, q).backend]


def test_priority_and_table() -> None:
    import prefill.backends

    assert [b.name for b in PRIORITY] == ["fa3", "fa2", "reference"]
    documented = [
        line.split("|")[2].strip()
        for line in (prefill.backends.__doc__ or "").splitlines()
        if line[:3] in ("| 1", "| 2", "| 3")
    ]
    assert documented == [b.name for b in PRIORITY]


def test_build_info_ignores_what_it_does_not_know() -> None:
    build = BuildInfo.from_json(
        '{"version": "9", "archs": {"fa2": ["80-real"]}, "new": 1, "kernels": [{"backend": "fa2", '
        '"dtype": "float16", "head_dim_qk": 64, "head_dim_vo": 64, "colour": "red"}]}'
    )
    assert build.kernels[0].name == "fa2_float16_64x64"
    assert build.cuda == ""


def test_device_facts_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Properties:
        name, major, minor, shared_memory_per_block_optin = "Fake", 9, 0, 232448
        multi_processor_count = 132

    def properties(device: torch.device) -> type[Properties]:
        asked.append(device)
        return Properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    support._device_info.cache_clear()
    try:
        for _ in range(3):
            info = support.device_info(torch.device("cuda", 1))
        assert info == DeviceInfo("cuda", 1, "Fake", (9, 0), 232448, 132)
        assert asked == [torch.device("cuda", 1)]
        assert support.device_info(torch.device("cpu")) == CPU
    finally:
        support._device_info.cache_clear()
