"""What does not fit between the options of an environment and what its constructor takes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from headrace.objects import near, shortened


def misfit(factory: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """The end of a sentence that says which option is missing, unknown, or of another type than its annotation; empty
    where all fit, or the factory does not say what it takes.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ""
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [name for name in options if name not in named]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken = f"it takes {', '.join(named)}" if named else "it takes none"
        return f": {unknown[0]!r} is no option of it{near(unknown[0], named) or f', {taken}'}"
    missing = [name for name, p in named.items() if p.default is p.empty and name not in options]
    if missing:
        name = missing[0]
        return f": it needs {name}, as in options = {{ {name} = … }} or `-o {name}=…`"
    return next(filter(None, (_mistyped(factory, name, value) for name, value in options.items())), "")


def _mistyped(factory: Callable[..., Any], name: str, value: Any) -> str:
    # A class is called by its __init__, which has the annotations.
    function: Any = factory
    if isinstance(factory, type):
        function = function.__init__
    try:
        adapter = pydantic.TypeAdapter(typing.get_type_hints(function)[name])
    except (TypeError, NameError, KeyError, AttributeError, pydantic.errors.PydanticUserError):
        return ""  # not annotated, or by what cannot be checked
    try:
        adapter.validate_python(value)
    except pydantic.ValidationError as error:
        message = error.errors()[0]["msg"]
        return f": {name} = {shortened(repr(value))}: {message[0].lower()}{message[1:]}"
    return ""
