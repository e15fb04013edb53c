"""`python -m prefill`: `demo` shows every backend at work, `info` what is here, `bench` times.

`check` tests this installation on this device; `explain` tells what a call would do on any.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from prefill import bench, check, demo, explain_command, info
from prefill._version import __version__


def make_parser() -> argparse.ArgumentParser:
    """The arguments of every command."""
    parser = argparse.ArgumentParser(prog="python -m prefill", description="Attention kernels.")
    parser.add_argument("--version", action="version", version=f"prefill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("demo", help="run the example and real activations on each backend")
    show.add_argument("--device", help="cuda (the default where there is one), cuda:1, cpu")
    about = commands.add_parser("info", help="versions, devices, kernels, why a backend cannot run")
    about.add_argument("--json", action="store_true", help="as JSON")
    timed = commands.add_parser("bench", help="GPU time beside other libraries' attention")
    bench.add_arguments(timed)
    tested = commands.add_parser("check", help="test this installation on this device: seconds")
    tested.add_argument("--device", help="cuda (the default where there is one), cuda:1, cpu")
    told = commands.add_parser("explain", help="what a call would do, here or on another device")
    explain_command.add_arguments(told)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = make_parser().parse_args(arguments)
    if options.command == "demo":
        return demo.run(options.device)
    if options.command == "bench":
        return bench.run(options)
    if options.command == "check":
        return check.run(options.device)
    if options.command == "explain":
        return explain_command.run(options)
    collected = info.collect()
    print(json.dumps(collected, indent=2) if options.json else info.render(collected))
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went, as `head` does: no traceback here, nor at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
