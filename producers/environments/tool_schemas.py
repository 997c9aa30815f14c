"""From a Python function to a tool: the JSON schema of its arguments, and arguments that it takes."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from headrace.errors import EnvironmentLoadError
from headrace.objects import reason

_PARAMETER = re.compile(r"^\s*(?::param\s+)?(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Example|Examples)\s*:\s*$")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function, and what it takes."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """As chat templates and OpenAI-style servers take it: `{"type": "function", "function": {…}}`."""
    arguments: type[pydantic.BaseModel]
    """Field `a0` is the first parameter, and so on; their aliases are the parameters' names."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """The tool that a function's signature and docstring describe. Raises EnvironmentLoadError."""
        name = getattr(function, "__name__", "")
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", name):
            raise EnvironmentLoadError(f"tool {function!r} has no name that a model could call: use a named function")
        text, of_parameters = described(inspect.getdoc(function) or "")
        arguments = _arguments(name, function, of_parameters)
        parameters = _without_titles(arguments.model_json_schema(by_alias=True))
        schema = {"name": name, "description": text, "parameters": parameters}
        return cls(name, function, {"type": "function", "function": schema}, arguments)

    def given(self, arguments: Mapping[str, Any], text_values: bool = False) -> dict[str, Any]:
        """What the function is called with; `text_values` are read as what each parameter takes.

        Raises ValueError, with words for the model, when it does not take them.
        """
        if text_values:
            properties = self.schema["function"]["parameters"].get("properties", {})
            arguments = {name: _from_text(properties.get(name, {}), text) for name, text in arguments.items()}
        try:
            taken = self.arguments.model_validate_json(json.dumps(dict(arguments)), strict=True)
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
            raise ValueError("; ".join(wrong)) from error
        fields = type(taken).model_fields
        return {
            str(field.alias): getattr(taken, name) for name, field in fields.items() if name in taken.model_fields_set
        }


def _from_text(schema: Mapping[str, Any], text: str) -> Any:
    """A parameter that takes text gets it as it is; any other gets the JSON that it is, if it is some."""
    if any(option.get("type") == "string" for option in (schema, *schema.get("anyOf", ()))):
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its sections, and what it says of parameters: `name: text` below `Args:`, or
    `:param name: text`.
    """
    text: list[str] = []
    of_parameters: dict[str, str] = {}
    section, last = "", ""
    for line in docstring.splitlines():
        if heading := _SECTION.match(line):
            section, last = heading[1], ""
            continue
        listed = section in ("Args", "Arguments", "Parameters") or line.lstrip().startswith(":param")
        found = _PARAMETER.match(line) if listed else None
        if found:
            last = found[1]
            of_parameters[last] = found[2].strip()
        elif listed and last and line.strip():
            of_parameters[last] += f" {line.strip()}"
        elif not section and not line.lstrip().startswith(":"):
            text.append(line.strip())
    return " ".join(" ".join(text).split()), of_parameters


def _arguments(name: str, function: Callable[..., Any], of_parameters: Mapping[str, str]) -> type[pydantic.BaseModel]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise EnvironmentLoadError(f"tool {name!r}: its annotations cannot be read ({reason(error)})") from error
    fields: dict[str, Any] = {}
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        what = f"tool {name!r}, parameter {parameter.name!r}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvironmentLoadError(f"{what}: a model gives arguments by name; write each parameter out")
        if parameter.name not in hints:
            raise EnvironmentLoadError(f"{what} has no type; annotate it, as in {parameter.name}: int")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = pydantic.Field(default, alias=parameter.name, description=of_parameters.get(parameter.name))
        try:
            made = pydantic.create_model(name, a0=(hints[parameter.name], field))
            made.model_json_schema()
        except (pydantic.errors.PydanticUserError, TypeError, ValueError) as error:
            raise EnvironmentLoadError(
                f"{what}: type {hints[parameter.name]} cannot be written as JSON; use str, int, float, bool, Literal, "
                "list, dict, Optional or a pydantic model"
            ) from error
        fields[f"a{place}"] = (hints[parameter.name], field)
    config = pydantic.ConfigDict(extra="forbid")
    model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=config, **fields)
    return model


def _without_titles(schema: Any) -> Any:
    """A JSON schema without what pydantic adds for forms; a parameter that is called "title" stays."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    kept.pop("additionalProperties", None) if kept.get("additionalProperties") is False else None
    return {key: _without_titles(value) for key, value in kept.items()}
