"""Arithmetic with a calculator: the model calls it, reads the result and says the answer."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Message, Rollout, ToolCall
from producers.environments.arithmetic import Arithmetic
from producers.environments.single_turn import SingleTurn
from producers.environments.tools import Result, Toolbox, ToolUse

PROMPT = "What is {expression}? Use the calculator, then reply with only the number."
LONGEST = 200
"""Letters of an expression: products of what is longer take long."""

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

MOST_SHOTS = 8

_EXPRESSION = re.compile(r"\d+(?: [-+*] \d+)+")
_SIGNS = re.compile(r"[\d\s.+\-*/()]+")


class ToolArithmetic:
    """The expressions of environment "arithmetic", with the same options and the same held-out part.

    The first turn whose calls all give a result is worth `called`; a final answer with the right number as its last one
    is worth the rest to 1. A rollout is correct when its answer is. Before the question stand `shots` others of the
    training part that are called for and answered, for models that would not call a tool by themselves.
    """

    def __init__(
        self,
        *,
        digits: int = 3,
        terms: int = 2,
        operators: Sequence[str] = ("+", "-", "*"),
        prompt: str = PROMPT,
        system: str = "",
        called: float = 0.4,
        shots: int = 0,
        held_out: int = 24,
    ) -> None:
        """Raises EnvironmentLoadError for an option that is out of range."""
        if not 0 <= called <= 1:
            raise EnvironmentLoadError(f"tool_arithmetic: called = {called} is not between 0 and 1")
        if not 0 <= shots <= MOST_SHOTS:
            raise EnvironmentLoadError(f"tool_arithmetic: shots = {shots} is not between 0 and {MOST_SHOTS}")
        self._questions = Arithmetic(digits=digits, terms=terms, operators=operators, prompt=prompt, held_out=held_out)
        self._tools = Toolbox([calculator])
        self._system, self._called = system, called
        places = [len(self._questions) * (2 * shot + 1) // (2 * shots) for shot in range(shots)]
        self._shots = [message for place in places for message in _shown(self._questions.episode("train", place, 0))]

    def __len__(self) -> int:
        return len(self._questions)

    def eval_size(self) -> int:
        return self._questions.eval_size()

    def episode(self, split: str, index: int, seed: int) -> ToolUse:
        question = self._questions.episode(split, index, seed)
        return ToolUse(
            question.prompt,
            question.answer,
            self._tools,
            system=self._system,
            before=self._shots,
            reward=_Once(self._called).reward,
        )

    async def score(self, rollout: Rollout) -> float:
        """The final reward; what the calls were worth has been given by then."""
        return 1.0 - self._called if self.correct(rollout) else 0.0

    def correct(self, rollout: Rollout) -> bool:
        # A last turn with calls is one that a limit has cut.
        return not rollout.turns[-1].tool_calls and self._questions.correct(rollout)


class _Once:
    def __init__(self, reward: float) -> None:
        self._left = reward

    def reward(self, results: Sequence[Result]) -> float:
        if any(result.failed for result in results):
            return 0.0
        reward, self._left = self._left, 0.0
        return reward


def _shown(question: SingleTurn) -> list[Message]:
    """A question as a model answers it that calls the calculator."""
    found, answer = _EXPRESSION.search(question.prompt), str(question.answer)
    call = ToolCall("calculator", {"expression": found.group() if found else answer}, "shot00000")
    return [
        Message("user", question.prompt),
        Message("assistant", "", (call,)),
        Message("tool", answer, tool_call_id=call.call_id, name=call.name),
        Message("assistant", answer),
    ]


def calculator(expression: str) -> int | float:
    """Computes a sum, difference, product or quotient of numbers.

    Args:
        expression: What to compute, as in 12 * (3 + 4).
    """
    if len(expression) > LONGEST or not _SIGNS.fullmatch(expression):
        raise ValueError(f"an expression has at most {LONGEST} letters: numbers, + - * / and brackets")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))  # type: ignore[no-any-return]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("the expression is not understood; + - * / and brackets are")
