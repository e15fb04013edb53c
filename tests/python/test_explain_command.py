"""`python -m prefill explain`: what `prefill.explain` says, without tensors or a device."""

from __future__ import annotations

import pytest
import torch

import prefill
from fakes import library, pretend, pretend_build
from prefill import explain_command, support
from prefill.__main__ import main
from prefill.devices import DEVICES, SMEM_PER_BLOCK, device_info_of
from prefill.explain import explain_request
from prefill.request import make_request

CALL = ("explain", "--qo-len", "128", "--kv-len", "4096")


@pytest.fixture
def _full_build(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_build(monkeypatch)


def said(capsys: pytest.CaptureFixture[str], *options: str, status: int = 0) -> str:
    assert main([*CALL, *options]) == status
    return capsys.readouterr().out


@pytest.mark.usefixtures("_full_build")
class TestPretendedDevices:
    @pytest.mark.parametrize(
        ("device", "backend"),
        [
            ("v100", "reference"),
            ("t4", "reference"),
            ("sm_70", "reference"),
            ("a100", "fa2"),
            ("A100", "fa2"),
            ("sm_86", "fa2"),
            ("4090", "fa2"),
            ("h100", "fa3"),
            ("sm_90a", "fa3"),
            ("b200", "fa2"),
            ("sm_120", "fa2"),
            ("cpu", "reference"),
        ],
    )
    def test_backend(self, capsys: pytest.CaptureFixture[str], device: str, backend: str) -> None:
        text = said(capsys, "--causal", "--device", device)
        assert text.startswith(f"backend: {backend} (")
        if backend != "reference":
            assert f"kernel:  {backend}_bfloat16_128x128, tile 128 x 128, splits: 1" in text

    def test_shared_memory_counts(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A kernel for an A100's shared memory is not one for a 4090."""
        monkeypatch.setattr(support, "_native", library(smem_bytes=128 << 10))
        assert said(capsys, "--device", "a100").startswith("backend: fa2")
        text = said(capsys, "--device", "4090")
        assert text.startswith("backend: reference")
        assert "needs 131072 bytes of shared memory per block; the device has 101376" in text

    def test_a_backend_that_cannot(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = said(capsys, "--device", "a100", "--backend", "fa3", status=1)
        assert text.startswith("backend: none (backend='fa3' cannot run this call")
        assert "device:  cuda:0 (A100, compute capability 8.0)" in text

    def test_the_driver_here_is_not_the_one_there(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(support, "driver_version", lambda: 12040)
        assert said(capsys, "--device", "h100").startswith("backend: fa3 (")

    def test_a_request_as_if_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(support, "device_info", lambda _: pytest.fail("asked for its own"))
        request = make_request(*torch.zeros(3, 5, 2, 64).half().unbind())
        for name, backend in (("a100", "fa2"), ("h100", "fa3")):
            assert explain_request(request, device_info_of(name)).backend == backend


OPTIONS = {
    "plain": ((), {}),
    "all at once": (
        (
            *("--causal", "--window-left", "100", "--logits-soft-cap", "30", "--sinks"),
            *("--pos-encoding-mode", "ROPE_LLAMA", "--kv-dtype", "float8_e4m3fn"),
            *("--return-lse", "--use-fp16-qk-reduction"),
        ),
        {
            "causal": True,
            "window_left": 100,
            "logits_soft_cap": 30.0,
            "sinks": torch.zeros(8),
            "pos_encoding_mode": "ROPE_LLAMA",
            "return_lse": True,
        },
    ),
    "bool mask": (("--mask", "bool"), {"custom_mask": torch.ones(128, 4096, dtype=torch.bool)}),
    "packed mask": (
        ("--mask", "packed"),
        {"packed_custom_mask": torch.zeros(128 * 4096 // 8, dtype=torch.uint8)},
    ),
    "HND": (("--kv-layout", "HND", "--o-dtype", "float32"), {"o_dtype": torch.float32}),
    "a backend": (("--backend", "fa2"), {"backend": "fa2"}),
}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "all at once"])
def test_says_what_explain_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, arguments = OPTIONS[name]
    pretend(monkeypatch)
    shapes = ("--heads", "8/2", "--head-dim", "192/128", "--dtype", "float16")
    monkeypatch.setattr(explain_command, "device_info_of", lambda _: support.device_info(_))
    text = said(capsys, *shapes, *options)
    q = torch.zeros(128, 8, 192).half()
    k, v = torch.zeros(4096, 2, 192).half(), torch.zeros(4096, 2, 128).half()
    if "HND" in options:
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        arguments = arguments | {"kv_layout": "HND"}
    assert text == f"{prefill.explain(q, k, v, **arguments)}\n"


@pytest.mark.usefixtures("_full_build")
def test_passes_of_mixed_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys,
        *("--pos-encoding-mode", "ROPE_LLAMA", "--kv-dtype", "float8_e4m3fn"),
        *("--sinks", "--window-left", "7", "--logits-soft-cap", "3", "--return-lse"),
        *("--device", "h200"),
    )
    assert "pass:    q: rotated\n" in text
    assert "pass:    k: widened from float8_e4m3fn to bfloat16 and rotated\n" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--heads", "32/5"), "num_qo_heads=32 is not a multiple of num_kv_heads=5"),
        (("--head-dim", "100"), "head_dim_qk=100 is not supported"),
        (("--use-fp16-qk-reduction",), "it needs both in torch.float16"),
        (("--device", "voodoo"), "--device voodoo is not here; expected cpu or one of"),
        (("--device", "cuda:63"), "To pretend a device name one of v100, t4, a100"),
    ],
)
def test_what_is_no_call(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    assert main([*CALL, *options]) == 2
    answer = capsys.readouterr()
    assert text in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dtype", "float32"), "invalid choice: 'float32'"),
        (("--o-dtype", "float8_e5m2"), "invalid choice: 'float8_e5m2'"),
        (("--heads", "32:8"), "'32:8': expected a number, or two as 32/8"),
        (("--heads", "9" * 20), "9" * 20 + ": expected at most 16384"),
        (("--head-dim", "128/16385"), "16385: expected at most 16384"),
        (("--qo-len", "-1"), "'-1': expected a number of tokens, 0 or more"),
        (("--kv-len", "1e6"), "'1e6': expected a number of tokens, 0 or more"),
        (("--kv-len", "9" * 20), "9" * 20 + ": expected at most 2147483648"),
        (("--kv-len", "9" * 5000), "9" * 5000 + ": expected at most 2147483648"),
    ],
)
def test_values_that_no_call_takes(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*CALL, *options])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("_full_build")
@pytest.mark.parametrize("mask", [(), ("--mask", "bool"), ("--mask", "packed")])
def test_the_longest_lengths(capsys: pytest.CaptureFixture[str], mask: tuple[str, ...]) -> None:
    longest = ("--qo-len", str(1 << 31), "--kv-len", str(1 << 31))
    heads = ("--heads", str(1 << 14), "--head-dim", "256")
    text = said(capsys, *longest, *heads, *mask, "--device", "h100")
    assert text.startswith("backend: reference (")
    assert "fa3 takes qo_len and kv_len below 2^30" in text


def test_without_a_device_it_takes_the_one_that_is_here() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_info_of(None) == support.device_info(torch.device(expected))


def test_each_named_device_has_its_shared_memory() -> None:
    assert {device.capability for device in DEVICES.values()} == set(SMEM_PER_BLOCK)
