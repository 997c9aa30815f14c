"""What tests share beside fixtures: waiting for a condition, a Redis of a test, making small groups."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

import numpy as np

from broker.messages import Group, Task, Trajectory, VersionSpan
from headrace.version import PolicyVersion
from tests.servers import RedisProcess as RedisProcess

FAR_FUTURE_MS = 4_000_000_000_000


async def wait_until(predicate: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition, plain or awaitable; fails with what was waited for."""
    deadline = time.monotonic() + seconds
    while True:
        answer = predicate()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
        await asyncio.sleep(0.005)


def wait_here(predicate: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """`wait_until` for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.01)


def make_task(task_id: str, *, kind: str = "train", group_size: int = 2, deadline_ms: int = FAR_FUTURE_MS) -> Task:
    return Task(
        task_id=task_id,
        kind="eval" if kind == "eval" else "train",
        environment="arithmetic",
        index=3,
        seed=7,
        group_size=group_size,
        min_version=PolicyVersion(1, 0),
        deadline_ms=deadline_ms,
        admitted_step=2,
    )


def make_trajectory(rng: np.random.Generator, *, prompt: int = 4, sampled: int = 6, vocab: int = 100) -> Trajectory:
    """Prompt tokens, then sampled ones, the latter half by a newer version."""
    tokens, middle = prompt + sampled, prompt + sampled // 2
    mask = np.arange(tokens) >= prompt
    logprobs = np.where(mask, -rng.random(tokens), 0.0).astype(np.float32)
    spans = [VersionSpan(prompt, middle, PolicyVersion(1, 4))] if middle > prompt else []
    spans.append(VersionSpan(middle, tokens, PolicyVersion(1, 5), "kept"))
    return Trajectory(
        token_ids_T=rng.integers(0, vocab, tokens, dtype=np.int32),
        logprobs_T=logprobs,
        loss_mask_T=mask,
        spans=tuple(spans),
        reward=float(rng.random()),
        finish_reason="stop",
    )


def make_group(task: Task, attempt: int, producer: str, *, seed: int = 0, vocab: int = 100) -> Group:
    """A sound group of the task's size."""
    rng = np.random.default_rng(seed)
    return Group(
        task_id=task.task_id,
        attempt=attempt,
        kind=task.kind,
        environment=task.environment,
        index=task.index,
        producer=producer,
        trajectories=tuple(make_trajectory(rng, vocab=vocab) for _ in range(task.group_size)),
        failures=(),
        seconds={"decode": 0.5},
    )
