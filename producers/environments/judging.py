"""Whether a completion says the right answer: the ways that data sets know."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Rollout
from producers.environments.arithmetic import last_number


class Judging:
    """`match` is one of MATCHES. With `answer_tag` only what stands in the last `<tag>…</tag>` counts."""

    def __init__(self, match: str, answer_tag: str = "", *, needs_answer: bool = True) -> None:
        """Raises EnvironmentLoadError."""
        if match not in MATCHES:
            raise EnvironmentLoadError(f"dataset: match = {match!r} is not one of {', '.join(MATCHES)}")
        if match == "math_verify" and find_spec("math_verify") is None:
            raise EnvironmentLoadError("dataset: match = 'math_verify' needs its package: pip install 'headrace[math]'")
        self._match, self._judged = match, needs_answer
        tag = re.escape(answer_tag)
        self._tagged = re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL) if answer_tag else None

    def right(self, rollout: Rollout) -> bool:
        """Without a right answer nothing is right: another reward says what it is worth."""
        if not self._judged:
            return False
        said = rollout.completion
        if self._tagged is not None:
            found = self._tagged.findall(said)
            if not found:
                return False
            said = found[-1]
        return bool(self._compare(said.strip(), rollout.answer))

    @cached_property
    def _compare(self) -> Callable[[str, Any], bool]:
        return MATCHES[self._match]()


def _exact() -> Callable[[str, Any], bool]:
    return lambda said, answer: said == str(answer).strip()


def _last_number() -> Callable[[str, Any], bool]:
    def same(said: str, answer: Any) -> bool:
        right = last_number(str(answer))
        if right is None:
            raise ValueError(f"the right answer {answer!r} has no number; choose another match")
        found = last_number(said)
        return found is not None and math.isclose(found, right, rel_tol=1e-9, abs_tol=1e-9)

    return same


def _math_verify() -> Callable[[str, Any], bool]:
    from producers.rewards.mathematics import load

    verify = load()
    return lambda said, answer: verify(Rollout("", 0, "", said, (), answer, "")) == 1.0


MATCHES: dict[str, Callable[[], Callable[[str, Any], bool]]] = {
    "exact": _exact,
    "last_number": _last_number,
    "math_verify": _math_verify,
}
"""Name to a function that makes the comparison of what was said with the right answer."""
