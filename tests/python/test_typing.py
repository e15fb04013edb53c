"""The overloads say what the function takes. (`typed_calls.py` is for a type checker.)"""

from __future__ import annotations

import importlib.resources
import inspect
import sys
import typing

import pytest

import prefill


def test_package_is_marked_as_typed() -> None:
    assert importlib.resources.files("prefill").joinpath("py.typed").is_file()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
def test_overloads_have_the_parameters_of_the_function() -> None:
    """All but return_lse, which they are about."""
    function = prefill.single_prefill_with_kv_cache
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("return_lse")
    overloads = typing.get_overloads(function)
    annotations = []
    for overload in overloads:
        others = dict(inspect.signature(overload).parameters)
        annotations.append(others.pop("return_lse").annotation)
        assert others == parameters
    assert annotations == ["Literal[False]", "Literal[True]", "bool"]
