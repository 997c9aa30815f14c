"""How models write tool calls: known formats, one learned from a chat template, and ours where it has none."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.objects import shortened
from producers.environments.api import Message, ToolCall

MOST_CALLS = 16
"""In one turn; a model that repeats itself writes as many as its tokens last."""
THOUGHT, AFTER_THOUGHT = "<think>", "</think>"
PROBE = ToolCall("headrace_probe", {"headrace_key": "headrace value"}, "call00000")
PROBE_ANSWER = "headrace-answer"
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Shows how a template writes tools.",
        "parameters": {"type": "object", "properties": {"headrace_key": {"type": "string"}}},
    },
}

_LEADING_MARKS = re.compile(r"\s*(<\|[^|>]*\|>\s*)*")
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls as JSON objects, one by one or in a list, each with a name and arguments.

    They stand behind the mark `begin`. Where that is empty, a call is a completion that is nothing but JSON.
    """

    begin: str

    def read(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in one completion, in order. What begins like one and is none comes with its `error`."""
        said = _aloud(text)
        calls = self._marked(said) if self.begin else _bare(said)
        if len(calls) > MOST_CALLS:
            calls = [*calls[:MOST_CALLS], _bad(f"there are more than {MOST_CALLS} calls in one turn")]
        return tuple(calls)

    def _marked(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        place = text.find(self.begin)
        while place >= 0 and len(calls) <= MOST_CALLS:
            place += len(self.begin)
            value, place, error = _decoded(text, place)
            calls += [_bad(error)] if error else _calls(value)
            place = text.find(self.begin, place)
        return calls


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """Calls as `<function=NAME>` … `</function>`, in it `<parameter=NAME>` … `</parameter>`, whose values are text."""

    def read(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in one completion, in order. What begins like one and is none comes with its `error`."""
        *whole, rest = _aloud(text).split("</function>")
        calls = [_tagged(part) for part in whole[:MOST_CALLS]]
        if len(whole) > MOST_CALLS:
            return (*calls, _bad(f"there are more than {MOST_CALLS} calls in one turn"))
        if "<tool_call>" in rest or "<function=" in rest:
            calls.append(_bad("it does not end with </function>"))
        return tuple(calls)


Format = ToolFormat | TaggedFormat

FORMATS: dict[str, Format] = {
    "hermes": ToolFormat("<tool_call>"),
    "llama3": ToolFormat(""),
    "mistral": ToolFormat("[TOOL_CALLS]"),
    "qwen3_coder": TaggedFormat(),
}
"""By what `model.tool_format` calls them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of Hermes and Qwen;
`{"name": …, "parameters": {…}}` and nothing else, of Llama 3; `[TOOL_CALLS][{"name": …, "arguments": {…}}]`; and tags,
of Qwen3-Coder and later ones."""


def learned(render: Callable[[Sequence[Message]], str], user: str) -> Format | None:
    """The format in which a chat template writes a made-up call that answers `user`; None where it is not known.

    `render` gives the text of a conversation with PROBE_TOOL.
    """
    call = _after(render([Message("user", user), Message("assistant", "", (PROBE,))]), user)
    if f"<function={PROBE.name}>" in call:
        return TaggedFormat()
    answer = _after(render([Message("user", user), Message("assistant", PROBE_ANSWER)]), user)
    place = call.rfind("{", 0, max(0, call.rfind(PROBE.name)))
    while place >= 0:
        value, _, error = _decoded(call, place)
        if not error and _calls(value)[0].name == PROBE.name:
            return ToolFormat(_mark(call[:place], answer[: max(0, answer.rfind(PROBE_ANSWER))]))
        place = call.rfind("{", 0, place)
    return None


def writes_calls(render: Callable[[Sequence[Message]], str], user: str) -> bool:
    """Whether a chat template writes calls at all, in whatever format."""
    return PROBE.name in _after(render([Message("user", user), Message("assistant", "", (PROBE,))]), user)


def explained(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages behind a system message of ours that says what tools there are, and how they are called."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = (
        f"You can use these tools:\n{lines}\n"
        "To use one, write a call in this form and nothing after it:\n"
        f"<tool_call>{_written(_sample(tools[0]))}</tool_call>\n"
        "The next message gives you its result."
    )
    first, *rest = messages or [Message("system", "")]
    if first.role == "system":
        return [Message("system", f"{first.content}\n\n{text}".strip()), *rest]
    return [Message("system", text), *messages]


def retold(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as plain text of assistant and user, for templates that know neither."""
    told: list[Message] = []
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if told and told[-1].role == "user" and told[-1].content.endswith("</tool_response>"):
                result = f"{told.pop().content}\n{result}"
            told.append(Message("user", result))
        elif message.tool_calls:
            calls = "".join(f"<tool_call>{_written(call)}</tool_call>" for call in message.tool_calls)
            told.append(Message(message.role, f"{message.content}{calls}"))
        else:
            told.append(message)
    return told


def _sample(tool: Mapping[str, Any]) -> ToolCall:
    """A call with the tool's own names, and values of their types: small models copy it."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    arguments = _example({"type": "object", **parameters}, parameters.get("$defs", {}))
    return ToolCall(str(function.get("name", "")), arguments)


def _example(schema: Any, named: Mapping[str, Any], depth: int = 8) -> Any:
    """A value of the type that a JSON schema asks for; `named` are those that it refers to."""
    if not isinstance(schema, Mapping) or not depth:
        return "…"
    inner = next((schema[way][0] for way in ("anyOf", "oneOf", "allOf") if schema.get(way)), None)
    if "$ref" in schema:
        inner = named.get(str(schema["$ref"]).rpartition("/")[2])
    if inner is not None:
        return _example(inner, named, depth - 1)
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type", "")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: _example(each, named, depth - 1) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        each = schema.get("prefixItems") or [schema.get("items", {})]
        return [_example(item, named, depth - 1) for item in each]
    return {"integer": 1, "number": 0.5, "boolean": True, "null": None}.get(kind, "…")


def _written(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def _aloud(text: str) -> str:
    """Without thoughts; one that was cut off goes on to the end."""
    return text.rpartition(AFTER_THOUGHT)[2].partition(THOUGHT)[0]


def _after(text: str, mark: str) -> str:
    return text.rpartition(mark)[2]


def _mark(before_call: str, before_answer: str) -> str:
    """What stands before a call and not before an answer: its last word, without the bracket of a list."""
    pairs = zip(before_call, before_answer, strict=False)
    common = "".join(call for call, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    opened = max(common.rfind("<"), common.rfind("["))
    if opened >= 0 and not re.search(r"[>\]]", common[opened:]):
        common = common[:opened]  # two marks that begin alike
    words = before_call[len(common) :].rstrip().removesuffix("[").split()
    return words[-1] if words else ""


def _bare(text: str) -> list[ToolCall]:
    """A completion that is JSON and names a tool; any other is an answer."""
    calls: list[ToolCall] = []
    place = _end(_LEADING_MARKS, text, 0)
    while text.startswith(("{", "["), place) and len(calls) <= MOST_CALLS:
        value, after, error = _decoded(text, place)
        if error:
            return [*calls, _bad(error)] if '"name"' in text[place:] else calls
        if not _names_a_tool(value):
            break
        calls += _calls(value)
        place = _end(_BETWEEN_CALLS, text, after)
    return calls


def _tagged(part: str) -> ToolCall:
    """What stands before one `</function>`."""
    name, closed, body = part.partition("<function=")[2].partition(">")
    if not name.strip() or not closed:
        return _bad("</function> ends no <function=NAME>")
    arguments: dict[str, str] = {}
    *pieces, rest = body.split("</parameter>")
    if "<parameter=" in rest:
        return ToolCall(name.strip(), {}, error="its last parameter does not end with </parameter>")
    for piece in pieces:
        parameter, _, value = piece.partition("<parameter=")[2].partition(">")
        arguments[parameter.strip()] = value.removeprefix("\n").removesuffix("\n")
    return ToolCall(name.strip(), arguments, text_values=True)


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _names_a_tool(value: object) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and isinstance(first.get("name"), str)


def _decoded(text: str, place: int) -> tuple[Any, int, str]:
    """The JSON value at `place`, where it ends, and what is wrong with it."""
    start = _end(_BETWEEN_CALLS, text, place)
    try:
        value, end = _decoder.raw_decode(text, start)
        # Numbers that overflow and halves of surrogate pairs can be decoded, and are nothing that could be shown.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        why = str(error) or type(error).__name__
        return None, start, f"it is not valid JSON ({why}): {shortened(text[start : start + 200])}"
    return value, end, ""


def _calls(value: object) -> list[ToolCall]:
    if isinstance(value, list):
        return [_call(each) for each in value] or [_bad("the list of calls is empty")]
    return [_call(value)]


def _call(value: object) -> ToolCall:
    inner = value.get("function") if isinstance(value, dict) else None
    fields = inner if isinstance(inner, dict) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return _bad('it must be a JSON object with "name" and "arguments"')
    arguments = fields.get("arguments", fields.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _, _ = _decoded(arguments, 0)
    if not isinstance(arguments, dict):
        return ToolCall(fields["name"], {}, error="its arguments must be a JSON object")
    return ToolCall(fields["name"], arguments)


def _bad(why: str) -> ToolCall:
    return ToolCall("", {}, error=why)
