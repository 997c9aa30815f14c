"""What an environment may do once per producer: `setup()` before its first episode, `teardown()` after its last one.

Both are optional, coroutine functions or plain ones. They run in the producer's process; reward processes build
environments of their own, for `score` and `correct` alone, and call neither.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

from headrace.errors import EnvironmentLoadError
from producers.environments.api import Environment
from producers.environments.calls import Calls, RolloutFailed

log = logging.getLogger(__name__)

SETUP_S = 300.0
"""What one environment may take to set up: it may have containers to start."""
TEARDOWN_S = 10.0


async def set_up(environments: Mapping[str, Environment], stack: AsyncExitStack) -> None:
    """Set up all, side by side. Closing `stack` tears down each of them once, also one whose setup failed or was cut.

    Raises EnvironmentLoadError for the first that cannot be set up.
    """
    setups = {name: environment for name, environment in environments.items() if hasattr(environment, "setup")}
    for name, environment in environments.items():
        if hasattr(environment, "teardown"):
            stack.push_async_callback(_tear_down, name, environment)
    results = await asyncio.gather(*(_set_up(name, each) for name, each in setups.items()), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _set_up(name: str, environment: Environment) -> None:
    try:
        await Calls(SETUP_S).ask(f"setup of environment {name!r}", environment.setup)  # type: ignore[attr-defined]
    except RolloutFailed as failed:
        if isinstance(failed.__cause__, EnvironmentLoadError):
            raise failed.__cause__ from None  # its own sentence
        raise EnvironmentLoadError(f"environment {name!r} cannot be set up: {failed}") from failed


async def _tear_down(name: str, environment: Environment) -> None:
    """A producer leaves all the same when this fails."""
    try:
        await Calls(TEARDOWN_S).ask(f"teardown of environment {name!r}", environment.teardown)  # type: ignore[attr-defined]
    except RolloutFailed as failed:
        log.warning("environment %r is not torn down: %s", name, failed)
