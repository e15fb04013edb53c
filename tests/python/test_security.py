"""What the package asks of the machine: nothing but its own folder.

A process with an audit hook tells each file, socket, process and library that Python opens while
the package is imported and called. `test_binary.py` reads how the library is linked; `test_fuzz.py`
and `test_validation.py` hold that malformed arguments end in an error before any kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import prefill

PACKAGE = Path(prefill.__file__).parent

PROGRAM = """
import json, sys, torch
events, phase = [], "import"
WATCHED = ("open", "os.", "socket.", "subprocess.", "ctypes.dlopen", "urllib.", "shutil.", "pty.",
           "http.", "ftplib.", "smtplib.", "tempfile.", "pickle.")

def hook(event, arguments):
    if event.startswith(WATCHED):
        events.append((phase, event, [str(x) for x in arguments[:2]]))

sys.addaudithook(hook)
import prefill
phase = "call"
q = torch.ones(5, 2, 64, dtype=torch.float16)
mask = torch.ones(5, 5, dtype=torch.bool)
for arguments in ({"causal": True}, {"custom_mask": mask}, {"pos_encoding_mode": "ROPE_LLAMA"},
                  {"pos_encoding_mode": "ALIBI", "return_lse": True}, {"logits_soft_cap": 1.0}):
    prefill.single_prefill_with_kv_cache(q, q, q, **arguments)
    prefill.explain(q, q, q, **arguments)
prefill.packbits(mask, bitorder="little")
for wrong in ({"kv_layout": "x"}, {"sm_scale": "x"}, {"backend": "fa3"}):
    try:
        prefill.single_prefill_with_kv_cache(q, q, q, **wrong)
    except (ValueError, TypeError, NotImplementedError):
        pass
phase = "end"
print(json.dumps(events))
"""
Event = tuple[str, str, list[Any]]


def events_of(
    package: Path, folder: Path, program: str = PROGRAM, **environment: str
) -> list[Event]:
    """What a process saw that imports the package from there, started in that folder."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(event) for event in json.loads(done.stdout.splitlines()[-1])]


def is_code(path: str) -> bool:
    """A module's source or its compiled form, of this package or of what it imports."""
    return path.endswith((".py", ".pyc"))


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return events_of(PACKAGE, tmp_path_factory.mktemp("elsewhere"))


def test_the_hook_sees_something(events: list[Event]) -> None:
    opened = [str(arguments[0]) for _, event, arguments in events if event == "open"]
    assert any(path.startswith(str(PACKAGE)) for path in opened)
    assert "end" not in {phase for phase, _, _ in events}


def test_no_file_is_opened_but_code(events: list[Event]) -> None:
    for _, event, arguments in events:
        if event == "open":
            path, mode = str(arguments[0]), arguments[1]
            assert is_code(path), path
            assert mode in ("r", "rb", "None"), (path, mode)


def test_a_call_opens_nothing_of_the_package(events: list[Event]) -> None:
    """All of it is there after the import."""
    during = [str(a[0]) for phase, event, a in events if phase == "call" and event == "open"]
    assert not [path for path in during if path.startswith(str(PACKAGE))]


def test_no_network_and_no_process(events: list[Event]) -> None:
    harmless = ("os.listdir", "os.scandir")  # the finders of the import system
    found = {event for _, event, _ in events}
    wanted = ("socket.", "subprocess.", "os.", "urllib.", "http.", "tempfile.", "pickle.", "pty.")
    assert not {e for e in found if e.startswith(wanted) and not e.startswith(harmless)}


def test_no_library_but_its_own(events: list[Event]) -> None:
    opened = [arguments[0] for _, event, arguments in events if event == "ctypes.dlopen"]
    own = PACKAGE / "_kernels.so"
    assert opened == ([str(own)] if own.exists() else [])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package in another place, with a library that does not load."""
    there = tmp_path / "site" / "prefill"
    ignored = shutil.ignore_patterns("__pycache__", "_kernels.so")
    shutil.copytree(PACKAGE, there, ignore=ignored)
    (there / "_kernels.so").write_bytes(b"no library")
    return there


def test_libraries_elsewhere_are_not_looked_at(copy: Path, tmp_path: Path) -> None:
    """Of that name in the current folder, on LD_LIBRARY_PATH, in the home folder."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "_kernels.so").write_bytes(b"hostile")
    seen = events_of(copy, hostile, LD_LIBRARY_PATH=str(hostile), HOME=str(hostile))
    opened = [arguments[0] for _, event, arguments in seen if event == "ctypes.dlopen"]
    assert opened == [str(copy / "_kernels.so")]
    assert not [a for _, event, a in seen if event == "open" and str(hostile) in str(a[0])]


def test_a_library_that_does_not_load_is_a_reason_and_no_crash(copy: Path, tmp_path: Path) -> None:
    program = """
import json, prefill, torch
from prefill import support
q = torch.ones(5, 2, 64, dtype=torch.float16)
assert bool((prefill.single_prefill_with_kv_cache(q, q, q) == 1).all())
print(json.dumps([["", "missing", [support.native().missing]]]))
"""
    ((_, _, (text,)),) = events_of(copy, tmp_path, program)
    assert "do not load" in text
    assert "_kernels.so" in text


def test_a_home_that_cannot_be_written(copy: Path, tmp_path: Path) -> None:
    """Nothing is cached there, nor in the current folder or in the package's own."""
    home = tmp_path / "home folder"
    home.mkdir()
    before = sorted(copy.rglob("*"))
    home.chmod(0o500)
    copy.chmod(0o500)
    try:
        events_of(copy, home, HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
    finally:
        home.chmod(0o700)
        copy.chmod(0o700)
    assert list(home.iterdir()) == []
    assert sorted(copy.rglob("*")) == before
