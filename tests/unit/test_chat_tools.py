"""Tools through chat templates: how they are shown, how calls are read, how results come back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Literal

import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from producers.chat import ByteChat, TemplateChat
from producers.environments.api import Message, ToolCall
from producers.environments.tool_schemas import Tool
from producers.tool_formats import FORMATS, MOST_CALLS, TaggedFormat, ToolFormat, explained, learned, retold
from tests.templates import DROPS, LLAMA, MISTRAL, PLAIN, QWEN, TAGS, USERS_ONLY, XML, byte_chat

JSON_FORMATS = {name: form for name, form in FORMATS.items() if isinstance(form, ToolFormat)}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ASKED = [Message("system", "Be brief."), Message("user", "1 + 2?")]
CALL = ToolCall("add", {"a": 1}, "call00000")
RESULT = Message("tool", "3", tool_call_id="call00000", name="add")


def said(chat: TemplateChat, text: str) -> tuple[ToolCall, ...]:
    return chat.tool_calls(chat.tokens(text))


@pytest.mark.parametrize(
    ("template", "found"),
    [(QWEN, "<tool_call>"), (LLAMA, ""), (MISTRAL, "[TOOL_CALLS]"), (PLAIN, "<tool_call>"), (None, "<tool_call>")],
)
def test_the_format_is_learned_from_the_template(template: str | None, found: str) -> None:
    assert byte_chat(template).template.format == ToolFormat(found)


@pytest.mark.parametrize(
    ("before_call", "before_answer", "mark"),
    [
        ("<tool>", "<text>", "<tool>"),
        ("<think>\n\n</think>\n\n<tool_call>\n", "<think>\n\n</think>\n\n", "<tool_call>"),
        ("\n[CALLS] [", "\n", "[CALLS]"),
        ("\n", "\n", ""),
    ],
)
def test_the_mark_is_what_stands_before_calls_alone(before_call: str, before_answer: str, mark: str) -> None:
    def render(messages: Sequence[Message]) -> str:
        answer = messages[-1]
        calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in answer.tool_calls]
        return f"<user>{messages[0].content}<assistant>" + (
            before_call + calls[0] if calls else before_answer + answer.content
        )

    assert learned(render, "question") == ToolFormat(mark)


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_what_the_template_writes_of_a_call_is_read_as_that_call(template: str) -> None:
    chat = byte_chat(template)
    user = Message("user", "1 + 2?")
    begun = chat.template.render([user], (ADD,), generate=True)
    whole = chat.template.render([user, Message("assistant", "", (CALL,))], (ADD,), generate=False)
    # Qwen's newline after the header is the prompt's or the call's.
    answer = whole.removeprefix(begun.rstrip("\n"))
    assert answer != whole
    assert said(chat, answer) == (ToolCall("add", {"a": 1}),)


def test_a_format_that_is_not_known_must_be_named() -> None:
    with pytest.raises(
        ModelError, match=r"format that is not known; name .* model.tool_format \(hermes, llama3, mistr"
    ):
        said(byte_chat(XML), "<function=add></function>")
    with pytest.raises(ModelError, match="format that is not known"):
        byte_chat(XML).prompt(ASKED, (ADD,))
    assert len(byte_chat(XML).prompt(ASKED))
    assert said(byte_chat(XML, "llama3"), '{"name": "add", "parameters": {}}') == (ToolCall("add", {}),)


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_tools_are_shown_by_the_template(template: str) -> None:
    chat = byte_chat(template)
    messages = ASKED[1:]
    assert chat.written(chat.prompt(messages, (ADD,))) == chat.template.render(messages, (ADD,), generate=True)
    assert "Adds." in chat.written(chat.prompt(messages, (ADD,)))


@pytest.mark.parametrize("template", [PLAIN, USERS_ONLY, None])
def test_a_template_without_tools_has_them_explained(template: str | None) -> None:
    chat = byte_chat(template)
    shown = chat.written(chat.prompt(ASKED, (ADD,)))
    assert shown.count("Be brief.") == shown.count("Adds.") == shown.count("1 + 2?") == 1
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}' in shown
    last = chat.tokens("<|im_end|>")[-1]
    follow_up = chat.written(chat.follow_up([RESULT, RESULT], int(last), (ADD,)))
    assert follow_up.count("<tool_response>\n3\n</tool_response>") == 2
    assert "tool\n" not in follow_up.replace("tool_", "")


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_results_come_back_in_the_templates_own_format(template: str) -> None:
    """What is carried is what the template writes of the conversation as a whole."""
    chat = byte_chat(template)
    user = Message("user", "1 + 2?")
    whole = chat.template.render([user, Message("assistant", "", (CALL,)), RESULT], (ADD,), generate=True)
    begun = chat.prompt([user], (ADD,))
    answer = whole[len(chat.written(begun)) :]
    end = chat.written(chat.tokens("")) or chat._tokenizer.eos_token
    call = chat.tokens(answer[: answer.index(end)] + end)
    carried = [*begun, *call, *chat.follow_up([RESULT], int(call[-1]), (ADD,))]
    assert chat.written(__import__("numpy").array(carried)) == whole
    assert carried == chat.tokens(whole).tolist()


def test_a_template_that_moves_its_tools_goes_on_with_results_alone() -> None:
    chat = byte_chat(MISTRAL)
    with pytest.raises(ModelError, match="rewrites earlier messages"):
        chat.follow_up([Message("user", "again")], 0, (ADD,))
    assert len(chat.follow_up([RESULT], 0, (ADD,)))


def test_results_that_a_template_leaves_out_are_told_by_the_user() -> None:
    chat = byte_chat(DROPS)
    assert chat.written(chat.prompt(ASKED, (ADD,))) == chat.template.render(ASKED, (ADD,), generate=True)
    told = chat.written(chat.follow_up([RESULT], 0, (ADD,)))
    assert told.endswith("<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_bytes_have_tools_too() -> None:
    chat = ByteChat()
    assert '"name": "add"' in chat.text(chat.prompt(ASKED, (ADD,)))
    assert chat.text(chat.follow_up([RESULT], 0, (ADD,))) == "<tool_response>\n3\n</tool_response>\n"
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert chat.tool_calls(chat._tokens(text)) == (ToolCall("add", {"a": 1}),)


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", "I would say 3.", []),
        (
            "hermes",
            'so <tool_call> {"name": "f", "arguments": {"x": "<tool_call>"}} </tool_call>',
            [("f", "<tool_call>")],
        ),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>[{"name": "g", "arguments": "{}"}]', [("f", None), ("g", None)]),
        ("hermes", '<think><tool_call>{"name": "no"}</think><tool_call>{"name": "f"}', [("f", None)]),
        ("hermes", '<think>perhaps <tool_call>{"name": "no"}</tool_call> or', []),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "f"}}', [("f", None)]),
        ("llama3", '{"name": "f", "parameters": {"x": 1}}', [("f", 1)]),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g"}<|eot_id|>',
            [("f", 1), ("g", None)],
        ),
        ("llama3", 'The call {"name": "f"} would do.', []),
        ("llama3", '{"answer": 3}', []),
        ("llama3", "{broken", []),
        ("llama3", "", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</s>', [("f", 1), ("g", None)]),
    ],
)
def test_calls_are_read(form: str, text: str, calls: list[tuple[str, object]]) -> None:
    found = FORMATS[form].read(text)
    assert [(call.name, call.arguments.get("x")) for call in found] == calls
    assert not any(call.error for call in found)


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', "it is not valid JSON"),
        ("hermes", "<tool_call>", "it is not valid JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}', "it is not valid JSON"),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}', "surrogates not allowed"),
        ("hermes", "<tool_call>" + "[" * 100_000, "it is not valid JSON"),
        ("hermes", "<tool_call>" + "1" * 5000, "it is not valid JSON"),
        ("hermes", '<tool_call>["f"]', 'must be a JSON object with "name"'),
        ("hermes", "<tool_call>[]", "the list of calls is empty"),
        ("hermes", '<tool_call>{"name": 3}', 'must be a JSON object with "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', "its arguments must be a JSON object"),
        ("llama3", '{"name": "f", "parameters": {"x": 1', "it is not valid JSON"),
    ],
)
def test_what_is_no_call_says_why(form: str, text: str, error: str) -> None:
    (call,) = FORMATS[form].read(text)
    assert error in call.error
    assert len(call.error) < 600


@pytest.mark.parametrize("form", JSON_FORMATS)
def test_calls_of_one_turn_are_bounded(form: str) -> None:
    one = f'{JSON_FORMATS[form].begin}{{"name": "f"}};'
    found = JSON_FORMATS[form].read(one * 1000)
    assert len(found) == MOST_CALLS + 1
    assert [bool(call.error) for call in found] == [False] * MOST_CALLS + [True]


@given(st.sampled_from(sorted(JSON_FORMATS)), st.text(alphabet='<>[]{}",: \\ntol_calTOLCAS1e', max_size=80))
def test_any_text_can_be_read(form: str, text: str) -> None:
    for whole in (text, JSON_FORMATS[form].begin + text, f'{{"name": "f", {text}'):
        for call in JSON_FORMATS[form].read(whole):
            assert call.name or call.error


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_results_of_an_environments_own_tools_go_through_the_template_too(template: str) -> None:
    chat = byte_chat(template)
    assert chat.follow_up([RESULT], 0).tolist() == chat.follow_up([RESULT], 0, (ADD,)).tolist()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.sampled_from(sorted(JSON_FORMATS)), st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3))
def test_a_call_that_is_written_is_read(form: str, name: str, arguments: dict[str, object]) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    assume("think>" not in text)
    assert JSON_FORMATS[form].read(f"{JSON_FORMATS[form].begin}{text}") == (ToolCall(name, arguments),)


TAGGED = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def test_calls_in_tags_are_learned_and_read() -> None:
    chat = byte_chat(TAGS)
    assert chat.template.format == TaggedFormat()
    text = chat.template.render([Message("assistant", "", (CALL,))], (ADD,), generate=False)
    assert TAGGED in text
    assert said(chat, TAGGED + TAGGED) == (ToolCall("add", {"a": "1"}, text_values=True),) * 2
    assert said(chat, "no call") == ()
    assert said(chat, "<think></function></think>3") == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\n<function=add>\n<parameter=a>", "it does not end with </function>"),
        ("<tool_call>", "it does not end with </function>"),
        ("</function>", "</function> ends no <function=NAME>"),
        ("<function=>x</function>", "</function> ends no <function=NAME>"),
        (
            "<function=f><parameter=a>1</parameter><parameter=b>2</function>",
            "its last parameter does not end with </parameter>",
        ),
    ],
)
def test_what_is_no_call_in_tags_says_why(text: str, error: str) -> None:
    assert [call.error for call in TaggedFormat().read(text)] == [error]
    assert len(TaggedFormat().read(TAGGED * 1000)) == MOST_CALLS + 1


@given(st.text(alphabet="<>/=function parameter_l\n", max_size=80))
def test_any_tags_can_be_read(text: str) -> None:
    for call in TaggedFormat().read(text + TAGGED):
        assert call.name or call.error


def test_conversations_are_told_without_roles_for_tools() -> None:
    told = retold([Message("user", "q"), Message("assistant", "well", (CALL,)), RESULT, RESULT, Message("user", "r")])
    assert [message.role for message in told] == ["user", "assistant", "user", "user"]
    assert told[1].content == 'well<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert told[2].content.count("<tool_response>") == 2
    assert [message.role for message in explained([], (ADD,))] == ["system"]


class Place(pydantic.BaseModel):
    row: int
    name: str | None = None


def everything(
    text: str,
    count: int,
    share: float,
    sure: bool,
    unit: Literal["kg", "lb"],
    maybe: int | None,
    words: list[str],
    pair: tuple[int, str],
    table: dict[str, int],
    place: Place,
    places: list[Place],
    mixed: int | str = 3,
) -> str:
    return text


def test_the_call_that_is_shown_is_one_that_the_tool_takes() -> None:
    tool = Tool.of(everything)
    (told,) = explained([], (tool.schema,))
    (call,) = FORMATS["hermes"].read(told.content)
    assert set(call.arguments) == set(inspect.signature(everything).parameters)
    assert tool.given(call.arguments)["places"] == [Place(row=1, name="…")]


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (None, {}),
        ({"properties": {"a": {"type": ["integer", "null"]}, "b": True}}, {"a": 1, "b": "…"}),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}, {"a": "…"}),
    ],
)
def test_any_schema_is_shown(parameters: object, arguments: object) -> None:
    (told,) = explained([], ({"type": "function", "function": {"name": "f", "parameters": parameters}},))
    (call,) = FORMATS["hermes"].read(told.content)
    assert call == ToolCall("f", arguments)  # type: ignore[arg-type]
