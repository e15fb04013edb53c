"""`python -m prefill`: `demo` shows every backend at work, `info` what is here, `bench` times."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from prefill import bench, demo, info


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m prefill", description="Attention kernels.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("demo", help="run the example and real activations on each backend")
    show.add_argument("--device", help="cuda (the default where there is one), cuda:1, cpu")
    about = commands.add_parser("info", help="versions, devices, kernels, why a backend cannot run")
    about.add_argument("--json", action="store_true", help="as JSON")
    timed = commands.add_parser("bench", help="GPU time beside torch's and FlashInfer's attention")
    bench.add_arguments(timed)
    options = parser.parse_args(arguments)
    if options.command == "demo":
        return demo.run(options.device)
    if options.command == "bench":
        return bench.run(options)
    collected = info.collect()
    print(json.dumps(collected, indent=2) if options.json else info.render(collected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
