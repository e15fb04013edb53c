"""Random calls with lengths up to 700, from seeds: `test_seeded[fa3-7]` is seed 7 on fa3."""

from __future__ import annotations

import pytest

from cases import check
from combinations import Seeded, random_case


@pytest.mark.parametrize("seed", range(200))
def test_seeded(backend: str, seed: int) -> None:
    check(random_case(Seeded(seed), backend), backend)
