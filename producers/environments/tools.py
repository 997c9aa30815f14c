"""Tools: Python functions that the model may call, their schemas, and the episode in which it does.

Whatever is wrong with a call is for the model to see, as the text of its result, and never ends the rollout: JSON that
is none, a tool that there is not, arguments of another type, a tool that raises or is too slow.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
import pydantic_core

from headrace.errors import EnvironmentLoadError
from headrace.objects import reason
from producers.environments.api import Done, Message, Observation, ToolCall, Turn

MOST_THREADS = 64
"""Calls of plain functions of this process that go on although nobody waits for them any more."""
LONGEST_RESULT = 4000
"""Letters of one result."""

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

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the function is called with. Raises ValueError, with words for the model, when it does not take them."""
        try:
            taken = self.arguments.model_validate_json(json.dumps(dict(arguments)), strict=True)
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
            raise ValueError("; ".join(wrong)) from error
        fields = type(taken).model_fields
        return {
            str(field.alias): getattr(taken, name) for name, field in fields.items() if name in taken.model_fields_set
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one call."""

    call: ToolCall
    text: str
    failed: bool = False

    @property
    def message(self) -> Message:
        return Message("tool", self.text, tool_call_id=self.call.call_id, name=self.call.name)


class Toolbox:
    """Tools by name. Coroutine functions run on the event loop, plain ones in a thread each."""

    def __init__(self, functions: Sequence[Callable[..., Any]], *, deadline_s: float = 5.0) -> None:
        """All calls of one turn may take `deadline_s` together: less than `producer.reward_deadline_s`.

        Raises EnvironmentLoadError for a function that is no tool, or two of one name.
        """
        tools = [Tool.of(function) for function in functions]
        self._tools = {tool.name: tool for tool in tools}
        self._deadline_s = deadline_s
        if len(self._tools) < len(tools) or not tools:
            raise EnvironmentLoadError("tools: at least one is needed, and each needs a name of its own")

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.schema for tool in self._tools.values())

    async def answer(self, calls: Sequence[ToolCall]) -> tuple[Result, ...]:
        """The results of one turn's calls, which are made one after the other."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._deadline_s
        return tuple([await self._result(call, end) for call in calls])

    async def _result(self, call: ToolCall, end: float) -> Result:
        tool = self._tools.get(call.name)
        if call.error:
            return _failed(call, call.error)
        if tool is None:
            return _failed(call, f"there is no tool {call.name!r}, only {', '.join(self._tools)}")
        try:
            given = tool.given(call.arguments)
        except ValueError as error:
            return _failed(call, f"{call.name} does not take these arguments ({error})")
        left_s = end - asyncio.get_running_loop().time()
        if left_s <= 0:
            return _failed(call, f"{call.name} was not called: the calls before it took {self._deadline_s:g} s")
        # A task holds its exception as a value, whatever its type.
        task = asyncio.ensure_future(_value(tool.function, given))
        try:
            await asyncio.wait({task}, timeout=left_s)
        finally:
            late = task.cancel()
        if late:
            return _failed(call, f"{call.name} took longer than {self._deadline_s:g} s")
        if task.cancelled():
            return _failed(call, f"{call.name} cancelled itself")
        raised = task.exception()
        return (
            Result(call, _text(task.result()))
            if raised is None
            else _failed(call, f"{call.name} raised {reason(raised)}")
        )


class ToolUse:
    """An episode in which each turn with calls is answered by their results; one without ends it, to be scored.

    `reward` says what a turn's results are worth at once, beside the final reward. `before` are messages between system
    and prompt: conversations that show how it is done.
    """

    def __init__(
        self,
        prompt: str,
        answer: Any,
        tools: Toolbox,
        *,
        system: str = "",
        before: Sequence[Message] = (),
        reward: Callable[[Sequence[Result]], float] = lambda results: 0.0,
    ) -> None:
        self._answer, self._tools, self._reward = answer, tools, reward
        messages = (*before, Message("user", prompt))
        self._messages = (Message("system", system), *messages) if system else messages

    @property
    def answer(self) -> Any:
        return self._answer

    async def reset(self) -> Observation:
        return Observation(self._messages, tools=self._tools.schemas)

    async def step(self, turn: Turn) -> Observation | Done:
        if not turn.tool_calls:
            return Done()
        results = await self._tools.answer(turn.tool_calls)
        return Observation(tuple(result.message for result in results), reward=self._reward(results))

    async def close(self) -> None:
        return None


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


_threads = threading.BoundedSemaphore(MOST_THREADS)


async def _value(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**given)
        value = await _in_thread(lambda: function(**given))
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:
        # A task would not keep this one as a value: it would end the process.
        raise RuntimeError(reason(error)) from error


def _in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
    """A thread of its own: one that never ends occupies no worker, and does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    if not _threads.acquire(blocking=False):
        raise RuntimeError(f"{MOST_THREADS} earlier calls of tools have not ended yet")

    def work() -> None:
        try:
            value, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - it is the result
            value, error = None, raised
        finally:
            _threads.release()
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(reason(error)))

    threading.Thread(target=work, name="tool", daemon=True).start()
    return future


def _failed(call: ToolCall, why: str) -> Result:
    return Result(call, _shown(f"Error: {why}"), failed=True)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return _shown(value)
    return _shown(pydantic_core.to_json(value, fallback=str, inf_nan_mode="constants").decode())


def _shown(text: str) -> str:
    """As a message may have it: bounded, and Unicode."""
    cut = text if len(text) <= LONGEST_RESULT else f"{text[:LONGEST_RESULT]}… (cut)"
    return cut.encode("utf-8", "replace").decode()
