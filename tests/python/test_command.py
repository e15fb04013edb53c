"""`python -m prefill`: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import prefill
from fakes import cuda, library
from prefill import demo, info, support
from prefill.__main__ import main
from prefill.text import table


def test_demo_on_the_cpu_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefill", "demo", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "The document's example" in done.stdout
    assert "Real activations" in done.stdout
    assert "rtol and atol 0.001: True" in done.stdout
    assert done.stdout.splitlines()[-1] == "all results agree"
    assert "WRONG" not in done.stdout


def test_demo_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.single_prefill_with_kv_cache_return_lse

    def wrong(*args: object, **kwargs: object) -> object:
        out, lse = right(*args, **kwargs)  # type: ignore[arg-type]
        return out * 1.01, lse

    monkeypatch.setattr(demo, "single_prefill_with_kv_cache_return_lse", wrong)
    assert main(["demo", "--device", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As `head` does: nothing on stderr."""
    with subprocess.Popen(
        [sys.executable, "-m", "prefill", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"BrokenPipe" not in process.stderr.read()
        assert process.wait() == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"prefill {prefill.__version__}\n"


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"prefill {prefill.__version__}" in text
    assert "reference  yes" in text
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["prefill"] == prefill.__version__
    assert (told["build"] is None) == (support.native().build is None)


def test_info_of_a_full_build_and_an_a100(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(support, "_native", library())
    monkeypatch.setattr(info.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(info.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(support, "device_info", lambda device: cuda(8, 0, 166912))
    monkeypatch.setattr(support, "driver_version", lambda: 13010)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    rows = [line.split("  ") for line in text.splitlines()]
    kernels = [[cell.strip() for cell in row if cell] for row in rows if row[0] in ("fa2", "fa3")]
    assert kernels == [
        ["fa2", "80-real 90-real 80-virtual", "bfloat16 float16", "64x64 128x128 192x128 256x256"],
        ["fa3", "90a-real", "bfloat16 float16", "64x64 128x128 192x128 256x256"],
        ["fa3", "90a-real", "float8_e4m3fn float8_e5m2", "128x128 192x128 256x256"],
    ]
    assert "cuda:0 Fake GPU sm_80 (8.0)  fa2        yes" in text
    assert "fa3        no: the device has compute capability 8.0" in text
    assert "driver's CUDA 13.1" in text
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"][0]["backends"]["fa2"] is None
    assert len(told["build"]["kernels"]) == 22


def test_info_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_native", support.NativeLibrary(None, support.NO_LIBRARY))
    monkeypatch.setattr(info.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(support, "driver_version", lambda: 0)
    text = " ".join(info.render(info.collect()).split())
    assert "kernels: none" in text
    assert "no compiled kernels" in text
    assert "driver's CUDA unknown" in text


def test_table_wraps_its_last_column() -> None:
    text = table(["a", "b"], [["x", "one two three four five six seven eight"]], width=34)
    assert text.splitlines() == [
        "a  b",
        "-  -------------------------------",
        "x  one two three four five six",
        "   seven eight",
    ]


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "demo" in capsys.readouterr().err


def test_demo_on_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda:63"]) == 2
    answer = capsys.readouterr()
    assert "--device cuda:63 is not here; expected cpu or one of" in answer.err
    assert answer.out == ""
