"""Every argument beside every other: the covering set of each backend, held against float64."""

from __future__ import annotations

import pytest

from cases import Case, check
from combinations import covering_set
from prefill.info import NATIVE_BACKENDS

CASES = [
    pytest.param(backend, case, id=f"{backend}-{number}")
    for backend in NATIVE_BACKENDS
    for number, case in enumerate(covering_set(backend))
]


@pytest.mark.parametrize(("backend", "case"), CASES, indirect=["backend"])
def test_every_pair(backend: str, case: Case) -> None:
    check(case, backend)
