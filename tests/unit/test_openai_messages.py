"""Messages of the OpenAI chat interface: what is new in a request, and whether it goes on from the one before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.environments.api import Message, ToolCall, Turn
from producers.environments.openai_messages import NotText, completion, message_of, retold, said

texts = st.text(max_size=8)
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.sampled_from(["a", "b"])}),
)
conversations = st.lists(messages, max_size=6)


@given(conversations, st.lists(messages, min_size=1, max_size=4))
def test_what_is_added_is_found(before: list[Any], more: list[Any]) -> None:
    told = [retold(message) for message in before]
    assert said(told, [retold(message) for message in [*before, *more]]) == [retold(message) for message in more]


@given(st.lists(messages, min_size=1, max_size=6), st.lists(messages, max_size=3), st.data())
def test_whatever_is_not_what_it_was_is_found(before: list[Any], more: list[Any], data: st.DataObject) -> None:
    told = [retold(message) for message in before]
    place = data.draw(st.integers(0, len(before) - 1))
    changed = {**before[place], "content": before[place]["content"] + "!"}
    with pytest.raises(NotText, match=f"message {place} of the conversation"):
        said(told, [retold(message) for message in [*before[:place], changed, *before[place + 1 :], *more]])
    with pytest.raises(NotText, match="can only be continued"):
        said(told, told[:place])
    with pytest.raises(NotText, match="can only be continued"):
        said(told, told)


@given(texts, st.lists(st.dictionaries(st.text(min_size=1, max_size=4), st.integers()), max_size=3))
def test_an_answer_comes_back_as_it_was(text: str, arguments: list[dict[str, int]]) -> None:
    calls = tuple(ToolCall("add", each, f"call{number:05d}") for number, each in enumerate(arguments))
    message = json.loads(json.dumps(completion(Turn(text, "stop", calls))))["choices"][0]["message"]
    told = retold(message)
    assert told == retold({**message, "reasoning_content": None})
    back = message_of(told, [told])
    assert back == Message("assistant", text or " ", calls)


def test_parts_of_text_are_text_and_others_are_not() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert retold({"role": "user", "content": parts})["content"] == "ab"
    with pytest.raises(NotText, match="content that is not text"):
        retold({"role": "user", "content": [*parts, {"type": "image_url", "image_url": {}}]})
    with pytest.raises(NotText, match="without a role"):
        retold({"content": "?"})
    with pytest.raises(NotText, match="not a function with a name"):
        retold({"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]})


@pytest.mark.parametrize(
    ("finish", "calls", "said_so"), [("stop", 0, "stop"), ("stop", 1, "tool_calls"), ("length", 1, "length")]
)
def test_finish_reasons(finish: str, calls: int, said_so: str) -> None:
    turn = Turn("x", finish, (ToolCall("add", {}, "c"),) * calls)
    assert completion(turn)["choices"][0]["finish_reason"] == said_so
    assert completion(Turn("x", finish, (ToolCall("add", {}, "c", error="no JSON"),)))["choices"][0]["message"] == {
        "role": "assistant",
        "content": "x",
    }


def test_arguments_without_types_get_those_of_the_tool() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    call = ToolCall("add", {"a": "1", "b": "2", "c": "three", "d": "4"}, "c", text_values=True)
    (made,) = completion(Turn("x", "stop", (call,)), [tool])["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 1, "b": "2", "c": "three", "d": "4"}
    (other,) = completion(Turn("x", "stop", (call,)))["choices"][0]["message"]["tool_calls"]
    assert json.loads(other["function"]["arguments"]) == dict(call.arguments)


def test_an_argument_that_is_nested_too_deep_stays_the_text_that_it_is() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    call = ToolCall("add", {"a": "[" * 100_000}, "c", text_values=True)
    (made,) = completion(Turn("x", "stop", (call,)), [tool])["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == dict(call.arguments)
