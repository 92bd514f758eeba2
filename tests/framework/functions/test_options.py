"""Options that functions pass on are typed as the functions that take them say."""

import inspect
import typing

import pytest

from meshwright.framework.compiler.program import TraceOptions, trace_program
from meshwright.framework.compiler.sharding_types.explain_types import (
    TypesOptions,
    explain_types,
)


@pytest.mark.parametrize(
    "options,takes", [(TraceOptions, trace_program), (TypesOptions, explain_types)]
)
def test_options_are_the_keyword_arguments(options, takes):
    keywords = {
        name
        for name, parameter in inspect.signature(takes).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    types = typing.get_type_hints(takes)
    assert typing.get_type_hints(options) == {name: types[name] for name in keywords}
