"""Programs that stand in for a GPU machine's, and a checkout with nothing but the scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ("environment.sh", "sanitize", "nightly")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def checkout(folder: Path, python: str = "") -> Path:
    """The folder `scripts` of a checkout in `folder`/root, which has a wheel too.

    In `folder`/bin are an nvidia-smi that names a GPU and a python that runs these lines of shell,
    but for `sanitizer_log.py`, which it runs as what it is.
    """
    scripts = folder / "root/scripts"
    scripts.mkdir(parents=True)
    for name in SCRIPTS:
        shutil.copy(ROOT / "scripts" / name, scripts)
    (folder / "root/tests/python").mkdir(parents=True)
    shutil.copy(ROOT / "tests/python/sanitizer_log.py", folder / "root/tests/python")
    (folder / "root/dist").mkdir()
    (folder / "root/dist/prefill-1-py3-none-any.whl").touch()
    program(folder / "bin/nvidia-smi", 'echo "GPU 0: a stand-in"')
    real = f'case "$1" in *sanitizer_log.py) exec "{sys.executable}" "$@" ;; esac'
    program(folder / "bin/python", f"{real}\n{python}")
    return scripts


def run_script(script: Path, *arguments: str, home: Path, **environment: str) -> tuple[int, str]:
    """Its exit status and output, with the programs of `home`/bin before all others."""
    done = subprocess.run(
        [str(script), *arguments],
        env={
            "PATH": f"{home}/bin:/usr/bin:/bin",
            "PYTHON": str(home / "bin/python"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
