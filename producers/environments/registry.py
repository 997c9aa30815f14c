"""Environments by name: what is built in, and what users name as their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.config import Config, EnvironmentConfig
from headrace.errors import EnvironmentLoadError
from headrace.objects import load_function, reason, shortened
from producers.environments.api import Environment
from producers.environments.options import misfit

LARGEST_SIZE = 1 << 63
"""What the broker's integers hold; no real dataset has as many prompts."""

METHODS = ("__len__", "eval_size", "episode", "score", "correct")


def build_environment(config: EnvironmentConfig) -> Environment:
    """Raises EnvironmentLoadError when it does not load, refuses its options or is no environment."""
    factory = BUILT_IN[config.name]() if config.name in BUILT_IN else _users(config.name)
    try:
        environment = factory(**config.options)
    except EnvironmentLoadError:
        raise
    except Exception as error:
        why = misfit(factory, config.options) or f" ({reason(error)})"
        raise EnvironmentLoadError(
            f"environment {config.name!r} cannot be made with options {config.options}{why}"
        ) from error
    missing = [name for name in METHODS if not callable(getattr(environment, name, None))]
    if missing:
        raise EnvironmentLoadError(f"environment {config.name!r} is not an environment: it has no {', '.join(missing)}")
    made: Environment = environment
    return made


def sizes_of(name: str, environment: Environment) -> tuple[int, int]:
    """Its numbers of training and of held-out prompts. Raises EnvironmentLoadError when it does not say them."""
    sizes = []
    # Called by name: len() itself refuses what it takes for no length with a sentence about len().
    for method in ("__len__", "eval_size"):
        try:
            answer = getattr(environment, method)()
        except EnvironmentLoadError:
            raise
        except Exception as error:
            raise EnvironmentLoadError(f"environment {name!r}: its {method} failed ({reason(error)})") from error
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < LARGEST_SIZE:
            raise EnvironmentLoadError(
                f"environment {name!r}: its {method} returned {shortened(repr(answer))}; "
                f"it must be a number from 0 to {LARGEST_SIZE - 1}"
            )
        sizes.append(answer)
    return sizes[0], sizes[1]


def environments_of(config: Config) -> dict[str, EnvironmentConfig]:
    """The environments of a run, by what tasks call them."""
    return {environment.called: environment for environment in config.environments}


def _users(name: str) -> Any:
    return load_function(name, f"environment {name!r}", EnvironmentLoadError, BUILT_IN)


def _arithmetic() -> Any:
    from producers.environments.arithmetic import Arithmetic

    return Arithmetic


def _dataset() -> Any:
    from producers.environments.dataset import Dataset

    return Dataset


def _reasoning_gym() -> Any:
    from producers.environments.reasoning_gym_adapter import ReasoningGym

    return ReasoningGym


def _guess_number() -> Any:
    from producers.environments.guess_number import GuessNumber

    return GuessNumber


def _tool_arithmetic() -> Any:
    from producers.environments.tool_arithmetic import ToolArithmetic

    return ToolArithmetic


def _verifiers() -> Any:
    from producers.environments.verifiers_adapter import Verifiers

    return Verifiers


BUILT_IN: dict[str, Callable[[], Any]] = {
    "arithmetic": _arithmetic,
    "dataset": _dataset,
    "guess_number": _guess_number,
    "reasoning_gym": _reasoning_gym,
    "tool_arithmetic": _tool_arithmetic,
    "verifiers": _verifiers,
}
"""Name to a function that imports and returns the factory."""
