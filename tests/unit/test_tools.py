"""Tools: schemas from signatures, and calls that go wrong in every way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest

from headrace.errors import EnvironmentLoadError
from producers.environments import tools
from producers.environments.api import Done, Message, ToolCall, Turn
from producers.environments.tool_schemas import Tool, described
from producers.environments.tools import LONGEST_RESULT, MOST_THREADS, Toolbox, ToolUse
from producers.rollout import play
from tests.replies import player_of
from tests.rollouts import TASK, Chats


class Place(pydantic.BaseModel):
    city: str
    zip: int | None = None


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


def weather(
    place: Place,
    days: int = 1,
    unit: Literal["celsius", "fahrenheit"] = "celsius",
    tags: list[str] | None = None,
    limits: Optional[dict[str, float]] = None,  # noqa: UP045 - users write it
    *,
    json: bool = False,
) -> str:
    """Says what the weather will be,
    for some days.

    Args:
        place: Where,
            exactly.
        days (int): How many.
    Returns:
        a text: of no parameter
    """
    return f"{place.city} {days} {unit} {tags} {limits} {json}"


def test_a_signature_becomes_a_schema() -> None:
    schema = Tool.of(weather).schema
    assert schema["type"] == "function"
    function = schema["function"]
    assert function["name"] == "weather"
    assert function["description"] == "Says what the weather will be, for some days."
    parameters = function["parameters"]
    assert parameters["required"] == ["place"]
    properties = parameters["properties"]
    assert list(properties) == ["place", "days", "unit", "tags", "limits", "json"]
    assert properties["place"]["description"] == "Where, exactly."
    assert properties["days"] == {"type": "integer", "default": 1, "description": "How many."}
    assert properties["unit"] == {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
    assert properties["tags"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert properties["limits"]["anyOf"][0] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert properties["json"] == {"type": "boolean", "default": False}
    assert parameters["$defs"]["Place"]["properties"]["city"] == {"type": "string"}
    assert "title" not in str(parameters)


def test_a_parameter_may_be_called_title() -> None:
    def book(title: str, kind: Annotated[Unit, "unit"] = Unit.C) -> str:
        """:param title: What it is called.
        :param kind: Its kind."""
        return title

    parameters = Tool.of(book).schema["function"]["parameters"]
    assert parameters["properties"]["title"] == {"type": "string", "description": "What it is called."}
    assert parameters["properties"]["kind"]["description"] == "Its kind."


def test_docstrings_are_read_as_far_as_they_go() -> None:
    assert described("") == ("", {})
    assert described("Does it.\n\nWell.") == ("Does it. Well.", {})
    assert described("Does it.\n\nArgs:\n    x: One.\n\nRaises:\n    ValueError: never.") == ("Does it.", {"x": "One."})


class Odd:
    pass


def untyped(a, b: int = 0): ...  # type: ignore[no-untyped-def]
def of_an_odd_type(a: Odd) -> None: ...
def of_a_function(a: Callable[[int], int]) -> None: ...
def of_any_number(*a: int) -> None: ...
def of_any_name(**a: int) -> None: ...
def by_place(a: int, /) -> None: ...
def of_nowhere(a: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (untyped, r"tool 'untyped', parameter 'a' has no type; annotate it, as in a: int"),
        (of_an_odd_type, r"tool 'of_an_odd_type', parameter 'a': type .*Odd.* cannot be written as JSON; use str, int"),
        (of_a_function, r"parameter 'a': type .*Callable.* cannot be written as JSON"),
        (of_any_number, r"parameter 'a': a model gives arguments by name"),
        (of_any_name, r"parameter 'a': a model gives arguments by name"),
        (by_place, r"parameter 'a': a model gives arguments by name"),
        (of_nowhere, r"tool 'of_nowhere': its annotations cannot be read \(NameError: name 'Nowhere'"),
        (lambda a: a, r"has no name that a model could call"),
    ],
)
def test_a_function_that_is_no_tool_is_one_sentence(function: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=sentence) as caught:
        Tool.of(function)
    assert "\n" not in str(caught.value)


def test_tools_need_names_of_their_own() -> None:
    for functions in ([], [weather, weather]):
        with pytest.raises(EnvironmentLoadError, match="at least one is needed, and each needs a name of its own"):
            Toolbox(functions)


async def results(functions: list[Callable[..., Any]], *calls: ToolCall, deadline_s: float = 5.0) -> list[str]:
    return [result.text for result in await Toolbox(functions, deadline_s=deadline_s).answer(calls)]


async def test_a_call_gives_the_function_what_it_takes() -> None:
    given = {"place": {"city": "Rome"}, "days": 2, "tags": ["a"], "limits": {"x": 1}, "json": True}
    assert await results([weather], ToolCall("weather", given)) == ["Rome 2 celsius ['a'] {'x': 1.0} True"]
    assert await results([weather], ToolCall("weather", {"place": {"city": "Rome"}})) == [
        "Rome 1 celsius None None False"
    ]


async def test_values_that_are_text_are_what_the_parameter_takes() -> None:
    given = {"place": '{"city": "Rome"}', "days": "2", "unit": "celsius", "limits": "null", "json": "True"}
    (result,) = await Toolbox([weather]).answer([ToolCall("weather", given, text_values=True)])
    assert result.text == "Rome 2 celsius None None True"

    def book(title: str, pages: int) -> str:
        return f"{title!r} {pages}"

    calls = [ToolCall("book", {"title": "1984", "pages": pages}, text_values=True) for pages in ("328", "many")]
    texts = await results([book], *calls)
    assert texts[0] == "'1984' 328"
    assert texts[1].startswith("Error: book does not take these arguments (pages: ")


async def adds(a: int, b: int) -> int:
    return a + b


def returns(what: str) -> Any:
    return {
        "none": None,
        "dict": {"a": [1, 2.5], "é": Place(city="Rome")},
        "nan": float("nan"),
        "odd": Odd,
        "bytes": b"\xff",
        "half": "half \udcff",
        "long": "x" * 10_000,
    }[what]


async def awaits(x: int) -> int:
    return x


def gives_a_coroutine(x: int) -> Any:
    return awaits(x)


async def test_results_are_text() -> None:
    calls = [ToolCall("returns", {"what": what}) for what in ("none", "dict", "nan", "half", "long", "odd")]
    texts = await results([returns], *calls)
    assert texts[:4] == ["null", '{"a":[1,2.5],"é":{"city":"Rome","zip":null}}', "NaN", "half ?"]
    assert texts[4] == "x" * LONGEST_RESULT + "… (cut)"
    assert "Odd" in texts[5]
    assert (await results([returns], ToolCall("returns", {"what": "bytes"})))[0].startswith(
        "Error: returns gave a result that cannot be shown (PydanticSerializationError: "
    )
    assert await results([adds, gives_a_coroutine], ToolCall("gives_a_coroutine", {"x": 3})) == ["3"]


def divides(a: int, b: int) -> float:
    return a / b


def leaves(code: int) -> None:
    raise SystemExit(code)


async def gives_up() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall("", {}, error="it is not valid JSON"), "Error: it is not valid JSON"),
        (ToolCall("sub", {}), "Error: there is no tool 'sub', only adds, divides, leaves, gives_up"),
        (ToolCall("adds", {"a": 1}), "Error: adds does not take these arguments (b: Field required)"),
        (
            ToolCall("adds", {"a": "1", "b": 2}),
            "Error: adds does not take these arguments (a: Input should be",
        ),
        (
            ToolCall("adds", {"a": 1, "b": 2, "c": 3}),
            "Error: adds does not take these arguments (c: Extra inputs are",
        ),
        (ToolCall("adds", {"a": 1.5, "b": True}), "Error: adds does not take these arguments (a: Input should be a va"),
        (ToolCall("divides", {"a": 1, "b": 0}), "Error: divides raised ZeroDivisionError: division by zero"),
        (ToolCall("leaves", {"code": 3}), "Error: leaves raised RuntimeError: SystemExit: 3"),
        (ToolCall("gives_up", {}), "Error: gives_up cancelled itself"),
    ],
)
async def test_what_is_wrong_is_for_the_model_to_see(call: ToolCall, text: str) -> None:
    box = Toolbox([adds, divides, leaves, gives_up])
    (result,) = await box.answer([call])
    assert result.text.startswith(text)
    assert result.failed
    assert result.message == Message("tool", result.text, tool_call_id=call.call_id, name=call.name)


async def test_a_tool_that_hangs_is_left() -> None:
    let_go = threading.Event()
    ended = threading.Event()

    def hangs() -> None:
        let_go.wait(30)
        ended.set()

    async def waits() -> None:
        await asyncio.Event().wait()

    calls = [ToolCall("adds", {"a": 1, "b": 2}), ToolCall("waits", {}), ToolCall("adds", {"a": 1, "b": 2})]
    texts = await results([adds, waits], *calls, deadline_s=0.5)
    # All calls of a turn share one deadline.
    assert texts[:2] == ["3", "Error: waits took longer than 0.5 s"]
    assert texts[2] == "Error: adds was not called: the calls before it took 0.5 s"
    assert await results([hangs], ToolCall("hangs", {}), deadline_s=0.05) == ["Error: hangs took longer than 0.05 s"]
    let_go.set()
    assert await asyncio.to_thread(ended.wait, 30)


async def test_threads_that_never_end_are_bounded() -> None:
    let_go = threading.Event()

    def hangs() -> None:
        let_go.wait(30)

    calls = [results([hangs], ToolCall("hangs", {}), deadline_s=0.2) for _ in range(MOST_THREADS)]
    assert await asyncio.gather(*calls) == [["Error: hangs took longer than 0.2 s"]] * MOST_THREADS
    refused = f"Error: hangs raised RuntimeError: {MOST_THREADS} earlier calls of tools have not ended yet"
    assert await results([hangs], ToolCall("hangs", {})) == [refused]
    let_go.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "tool"]:
        thread.join(30)
    assert await results([hangs], ToolCall("hangs", {})) == ["null"]


async def test_coroutines_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "MOST_LATE", 2)
    let_go = asyncio.Event()

    async def stays() -> None:
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()
        raise OSError("told to nobody")

    calls = [await results([stays], ToolCall("stays", {}), deadline_s=0.02) for _ in range(3)]
    assert calls == [["Error: stays took longer than 0.02 s"]] * 2 + [
        ["Error: 2 earlier calls of tools have not ended yet"]
    ]
    let_go.set()
    await asyncio.wait(tools._late)
    await asyncio.sleep(0)
    assert not tools._late
    assert await results([adds], ToolCall("adds", {"a": 1, "b": 2})) == ["3"]


async def test_as_many_calls_may_be_waited_for_as_rollouts_play() -> None:
    there = threading.Barrier(2 * MOST_THREADS)

    def meets() -> int:
        return there.wait(30) * 0

    calls = [results([meets], ToolCall("meets", {}), deadline_s=30) for _ in range(2 * MOST_THREADS)]
    assert await asyncio.gather(*calls) == [["0"]] * (2 * MOST_THREADS)


async def test_a_turn_with_calls_is_answered_and_one_without_ends() -> None:
    episode = ToolUse("1 + 2?", 3, Toolbox([adds]), system="Use it.", reward=lambda results: len(results) / 4)
    first = await episode.reset()
    assert [message.role for message in first.messages] == ["system", "user"]
    assert first.tools[0]["function"]["name"] == "adds"
    calls = (ToolCall("adds", {"a": 1, "b": 2}, "call00000"), ToolCall("adds", {}, "call00001"))
    answer = await episode.step(Turn("…", "stop", calls))
    assert not isinstance(answer, Done)
    assert [(message.role, message.tool_call_id) for message in answer.messages] == [
        ("tool", "call00000"),
        ("tool", "call00001"),
    ]
    assert (answer.messages[0].content, answer.reward) == ("3", 0.5)
    assert await episode.step(Turn("3", "stop")) == Done()


async def test_a_rollout_with_tools_from_text_to_result_and_back() -> None:
    """With bytes as tokens: the calls stand in what the model says, and have ids of the rollout's own."""

    def say(shown: str) -> str:
        if "<tool_response>\n3" in shown:
            return "It is 3."
        if "<tool_response>" in shown:
            return '<tool_call>{"name": "adds", "arguments": {"a": 1, "b": 2}}</tool_call>'
        return '<tool_call>{"name": "adds"</tool_call><tool_call>{"name": "no"}</tool_call>'

    player, _ = player_of(say)
    played = await play(player, Chats(lambda index, seed: ToolUse("1 + 2?", 3, Toolbox([adds]))), TASK, 0)
    turns = played.rollout.turns
    ids = [[call.call_id for call in turn.tool_calls] for turn in turns]
    assert ids == [["call00000", "call00001"], ["call00002"], []]
    assert turns[1].tool_calls[0].arguments == {"a": 1, "b": 2}
    shown = player.chat.text(played.transcript.token_ids())
    assert "Error: it is not valid JSON" in shown
    assert "there is no tool 'no', only adds" in shown
    mask = played.transcript.trajectory(0.0, "stop").loss_mask_T
    sampled = bytes(played.transcript.token_ids()[mask].astype("uint8")).decode().split("\0")
    assert sampled == [turn.text for turn in turns] + [""]
