"""Environments of the package verifiers that the tests play: what users would write with it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import verifiers as vf
from datasets import Dataset


def rows(count: int = 6) -> Dataset:
    return Dataset.from_list([{"question": f"guess {n}", "answer": str(n)} for n in range(count)])


def says_answer(completion: Any, answer: str) -> float:
    return float(completion[-1].content.strip() == answer)


class Guessing(vf.MultiTurnEnv):
    """Says "wrong" to each turn but the right one."""

    closed = 0
    torn = 0

    async def setup_state(self, state: Any) -> Any:
        state["seen"] = []
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["seen"].append(messages[-1].content)
        if messages[-1].content == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
        return [{"role": "user", "content": f"wrong {len(state['seen'])}"}]

    @vf.cleanup
    async def count(self, state: Any) -> None:
        Guessing.closed += 1

    @vf.teardown
    async def tear(self) -> None:
        Guessing.torn += 1


class Solved(vf.Rubric):
    """1 for the right guess, less a tenth for each wrong one before it."""

    def __init__(self) -> None:
        super().__init__(funcs=[self.solved], weights=[1.0])

    def solved(self, state: Any) -> float:
        seen = state["seen"]
        return 1.0 - 0.1 * (len(seen) - 1) if state["answer"] in seen else 0.0


def guessing(**options: Any) -> Any:
    return Guessing(dataset=rows(), rubric=Solved(), system_prompt="Guess.", max_turns=5, **options)


def with_eval() -> Any:
    return vf.SingleTurnEnv(dataset=rows(5), eval_dataset=rows(2), rubric=vf.Rubric(funcs=[says_answer]))


def with_lock() -> Any:
    """Its states hold what cannot leave the process."""

    class Locked(Guessing):
        async def setup_state(self, state: Any) -> Any:
            state["lock"] = threading.Lock()
            return await super().setup_state(state)

    return Locked(dataset=rows(), rubric=Solved(), max_turns=5)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def tools() -> Any:
    return vf.ToolEnv(tools=[add], dataset=rows(), rubric=vf.Rubric(funcs=[says_answer]))


class Rewriting(Guessing):
    """Shows each turn only the last guess."""

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        return messages if len(messages) < 3 else [*messages[:1], *messages[-1:]]


def rewriting() -> Any:
    return Rewriting(dataset=rows(), rubric=Solved(), system_prompt="Guess.", max_turns=5)


class Asking(Guessing):
    """Asks its client for what `how` says, by itself."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how = how

    async def get_model_response(self, state: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        client, messages = state["client"].client, [{"role": "user", "content": "?"}]
        if self.how == "several":
            await client.chat.completions.create(model="m", messages=messages, n=2)
        elif self.how == "parallel":
            ask = client.chat.completions.create
            await asyncio.gather(*(ask(model="m", messages=messages) for _ in range(2)))
        elif self.how == "text":
            await client.completions.create(model="m", prompt="?")
        elif self.how == "json":
            await client.chat.completions.create(model="m", messages=messages, response_format={"type": "json_object"})
        elif self.how == "stream":
            await client.chat.completions.create(model="m", messages=messages, stream=True)
        elif self.how == "picture":
            part = {"type": "image_url", "image_url": {"url": "data:,"}}
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        return await super().get_model_response(state, prompt, *args, **kwargs)


def asking(how: str) -> Any:
    return Asking(how, dataset=rows(), rubric=Solved(), max_turns=5)


class Failing(Guessing):
    """Raises after the first turn: an error of the package, or any other."""

    def __init__(self, error: str, **options: Any) -> None:
        super().__init__(**options)
        self.error = error

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise (vf.Error("no more") if self.error == "theirs" else LookupError("nothing there"))


def failing(error: str) -> Any:
    return Failing(error, dataset=rows(), rubric=Solved(), max_turns=5)


class Deaf(Guessing):
    """Goes on whatever its client says."""

    @vf.stop
    async def prompt_too_long(self, state: Any) -> bool:
        return False


def deaf() -> Any:
    return Deaf(dataset=rows(), rubric=Solved(), max_turns=50)


def relative() -> Any:
    def ranks(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[ranks]))


def nothing() -> int:
    return 3
