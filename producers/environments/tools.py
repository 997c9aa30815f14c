"""Tools: Python functions that the model may call, and the episode in which it does.

Whatever is wrong with a call is for the model to see, as the text of its result, and never ends the rollout: JSON that
is none, a tool that there is not, arguments of another type, a tool that raises or is too slow.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pydantic_core

from headrace.errors import EnvironmentLoadError
from headrace.objects import reason
from producers.environments.api import Done, Message, Observation, ToolCall, Turn
from producers.environments.tool_schemas import Tool

MOST_THREADS = 64
"""Calls of plain functions of this process that go on although nobody waits for them any more."""
MOST_LATE = 1024
"""The same of coroutine functions that do not end when they are cancelled."""
LONGEST_RESULT = 4000
"""Letters of one result."""


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
            given = tool.given(call.arguments, call.text_values)
        except ValueError as error:
            return _failed(call, f"{call.name} does not take these arguments ({error})")
        left_s = end - asyncio.get_running_loop().time()
        if left_s <= 0:
            return _failed(call, f"{call.name} was not called: the calls before it took {self._deadline_s:g} s")
        return await self._made(call, tool, given, left_s)

    async def _made(self, call: ToolCall, tool: Tool, given: Mapping[str, Any], left_s: float) -> Result:
        if len(_late) >= MOST_LATE:
            return _failed(call, f"{MOST_LATE} earlier calls of tools have not ended yet")
        # A task holds its exception as a value, whatever its type.
        task = asyncio.ensure_future(_value(tool.function, given))
        try:
            await asyncio.wait({task}, timeout=left_s)
        finally:
            if late := task.cancel():
                _late.add(task)
                task.add_done_callback(_ended)
        if late:
            return _failed(call, f"{call.name} took longer than {self._deadline_s:g} s")
        if task.cancelled():
            return _failed(call, f"{call.name} cancelled itself")
        raised = task.exception()
        if raised is not None:
            return _failed(call, f"{call.name} raised {reason(raised)}")
        try:
            return Result(call, _text(task.result()))
        except Exception as error:  # noqa: BLE001 - a result's own __str__ raises what it likes
            return _failed(call, f"{call.name} gave a result that cannot be shown ({reason(error)})")


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


_late: set[asyncio.Task[Any]] = set()
_left: set[threading.Thread] = set()
"""Of calls that nobody waits for any more; those that are waited for are bounded by the rollouts that play."""


def _ended(task: asyncio.Task[Any]) -> None:
    _late.discard(task)
    if not task.cancelled():
        task.exception()  # seen: nobody asks for it any more


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
    _left.difference_update([thread for thread in _left if not thread.is_alive()])
    if len(_left) >= MOST_THREADS:
        raise RuntimeError(f"{MOST_THREADS} earlier calls of tools have not ended yet")

    def work() -> None:
        try:
            value, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - it is the result
            value, error = None, raised
        with suppress(RuntimeError):  # the loop may have ended long ago
            loop.call_soon_threadsafe(settle, value, error)

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(reason(error)))

    thread = threading.Thread(target=work, name="tool", daemon=True)
    thread.start()
    future.add_done_callback(lambda waited: _left.add(thread) if waited.cancelled() else None)
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
