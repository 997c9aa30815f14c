"""The reward "math_verify" compares by value."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Rollout
from producers.rewards.registry import load_reward


def score(completion: str, answer: object) -> float:
    return load_reward("math_verify")(Rollout("m", 0, "", completion, (), answer, "stop"))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is $\\boxed{\\frac{1}{2}}$", "0.5", 1.0),
        ("The answer is \\boxed{0.5}.", "\\frac{1}{2}", 1.0),
        ("the result is 42", 42, 1.0),
        ("the result is 43", 42, 0.0),
        ("$x = 3$", "3", 1.0),
        ("$\\{2, 1\\}$", "$\\{1, 2\\}$", 1.0),
        ("$\\sqrt{8}$", "2\\sqrt{2}", 1.0),
        ("$\\boxed{(1, 2)}$", "(1,2)", 1.0),
        ("It is $\\boxed{1{,}234}$.", "1,234", 1.0),
        ("$x = 3$", "$x = 3$", 1.0),
        ("$2$", "2\\sqrt{2}", 0.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_right_and_wrong_answers(completion: str, answer: object, reward: float) -> None:
    assert score(completion, answer) == reward


def test_it_needs_no_signals() -> None:
    """Its own time limits would fail outside of the main thread."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score("$\\boxed{7}$", "7")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_it_does_not_warn_of_limits_that_are_off() -> None:
    """In a process of its own: the package warns once in each."""
    code = """
        from producers.environments.api import Rollout
        from producers.rewards.registry import load_reward
        print(load_reward("math_verify")(Rollout("m", 0, "", "$7$", (), "7", "stop")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1.0\n", "")


def test_an_answer_that_is_no_mathematics_fails_and_is_no_zero() -> None:
    with pytest.raises(ValueError, match="the right answer '' is not mathematics"):
        score("3", "")


def test_without_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(EnvironmentLoadError, match=r"pip install 'headrace\[math\]'"):
        load_reward("math_verify")
