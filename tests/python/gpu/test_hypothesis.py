"""The random calls of `test_random` once more, drawn and made smaller by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest

from cases import check
from combinations import random_case

pytest.importorskip("hypothesis", reason="test_random has the same calls from seeds")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drawn import Drawn


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_call(backend: str, data: Any) -> None:
    check(random_case(Drawn(data.draw), backend), backend)
