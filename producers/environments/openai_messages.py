"""Messages of the OpenAI chat interface, as ours and back, and as they are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from producers.environments.api import Message, Observation, ToolCall, Turn

EMPTY = " "
"""What stands for an empty completion, which clients take for the failure of a server."""


class NotText(Exception):
    """Its text says what is wrong with a conversation."""


def completion(turn: Turn, tools: Sequence[Any] = ()) -> dict[str, Any]:
    """The server's answer that says a turn. Calls that cannot be read stay what they are: text. `tools` are schemas."""
    calls = [_call(call, tools) for call in turn.tool_calls if not call.error]
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or EMPTY}
    finish = "length" if turn.finish_reason == "length" else "stop"
    if calls:
        message["tool_calls"] = calls
        finish = "tool_calls" if finish == "stop" else finish
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    return {"id": "headrace", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}


def retold(message: Any) -> Mapping[str, Any]:
    """A message with only what the model sees of it, to be compared. Raises NotText."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise NotText(f"a message is {str(message)[:80]!r}, without a role")
    told: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    if message.get("tool_calls"):
        told["tool_calls"] = [_retold_call(call) for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        told["tool_call_id"] = message["tool_call_id"]
    return told


def said(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """What `now` adds to the conversation `before`. Raises NotText when it does not go on from it."""
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            raise NotText(
                f"message {number} of the conversation, of the {old['role']}, was "
                f"{_short(old)} and is now {_short(new)}; a conversation can only be continued"
            )
    if len(now) <= len(before):
        raise NotText(f"a conversation of {len(now)} messages after one of {len(before)}; it can only be continued")
    return now[len(before) :]


def message_of(message: Mapping[str, Any], conversation: Sequence[Mapping[str, Any]]) -> Message:
    """Ours, of one that `retold` gave; a tool's result finds its tool's name by the call in the conversation."""
    calls = tuple(
        ToolCall(call["name"], _arguments(call["arguments"]), call["id"]) for call in message.get("tool_calls", ())
    )
    call_id = message.get("tool_call_id", "")
    name = ""
    if call_id:
        made = {call["id"]: call["name"] for each in conversation for call in each.get("tool_calls", ())}
        name = made.get(call_id, "")
    return Message(message["role"], message["content"], calls, call_id, name)


def observed(messages: Sequence[Message], tools: Sequence[Any], *, first: bool) -> Observation:
    return Observation(tuple(messages), tools=tuple(tools) if first else ())


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise NotText("a message has content that is not text")
    return "".join(str(text) for text in texts)


def _call(call: ToolCall, tools: Sequence[Any]) -> dict[str, Any]:
    arguments = _typed(call, tools) if call.text_values else dict(call.arguments)
    function = {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call.call_id, "type": "function", "function": function}


def _typed(call: ToolCall, tools: Sequence[Any]) -> dict[str, Any]:
    """Arguments that were written without types, read as JSON where the tool does not take text."""
    functions = (tool.get("function", {}) for tool in tools if isinstance(tool, Mapping))
    schema: Any = next((each.get("parameters", {}) for each in functions if each.get("name") == call.name), {})
    typed = dict(call.arguments)
    for name, of_it in schema.get("properties", {}).items():
        if isinstance(typed.get(name), str) and of_it.get("type") != "string":
            with suppress(ValueError, RecursionError):
                typed[name] = json.loads(typed[name])
    return typed


def _retold_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        return {"id": call["id"], "name": function["name"], "arguments": function["arguments"]}
    except (KeyError, TypeError) as error:
        raise NotText(f"a tool call is {str(call)[:80]!r}, not a function with a name and arguments") from error


def _arguments(text: Any) -> Mapping[str, Any]:
    try:
        arguments = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _short(message: Mapping[str, Any]) -> str:
    text = repr(message["content"])
    return text if len(text) <= 60 else f"{text[:60]}…"
