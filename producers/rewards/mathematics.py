"""The reward "math_verify": whether the last completion says the right answer, by the package math-verify.

It compares by value: 1/2 is 0.5 and \\frac{1}{2}, {1, 2} is {2, 1} (https://github.com/huggingface/Math-Verify).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Rollout

MARKS = ("$", r"\boxed", r"\[", r"\(")


def load() -> Callable[[Rollout], float]:
    """The reward. Raises EnvironmentLoadError without the package."""
    try:
        package: Any = importlib.import_module("math_verify")
    except ImportError as error:
        raise EnvironmentLoadError(
            f"reward 'math_verify' needs a package that is not there ({error}): pip install 'headrace[math]'"
        ) from error

    # It warns that its own time limits, which are signals, are off. The worker's deadline stops everything.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def math_verify(rollout: Rollout) -> float:
        """1 for a completion whose answer equals the rollout's, else 0. Raises ValueError for an answer that is no
        mathematics, because nothing could equal it.
        """
        right = _expression(package, rollout.answer)
        said = package.parse(rollout.completion, parsing_timeout=None)
        return float(bool(package.verify(right, said, timeout_seconds=None)))

    return math_verify


def _expression(package: Any, answer: object) -> Any:
    """The right answer, which need not have LaTeX's marks around it: without them, only its first number counts."""
    text = str(answer)
    marked = any(mark in text for mark in MARKS)
    for way in (text,) if marked else (f"${text}$", text):
        found = package.parse(way, parsing_timeout=None)
        if found:
            return found
    raise ValueError(f"the right answer {text!r} is not mathematics that math-verify can read")
