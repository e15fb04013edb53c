"""`python -m prefill bench`: this package's kernels beside those of other libraries, in one run.

`cases` says what is measured, `masks` which pairs its calls see, `contenders` who runs it, `check`
whether the results are right, `timing` how GPU time is taken, `host` what a call costs on the CPU,
`machine` where it ran, `report` what is printed and written, `command` ties them together.
"""

from prefill.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
