"""`headrace rollouts`: finished rollouts as they come, as text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from broker.api import OperatorPort, RunRecord
from broker.messages import Group, Trajectory
from deploy.printable import printable
from deploy.report import one_line
from deploy.run_folder import RunFolder

BLOCK_MS = 1000


@dataclass(frozen=True, slots=True)
class Shown:
    """One rollout as a person reads it."""

    task: str
    producer: str
    prompt: str
    completion: str
    reward: float
    lag: int
    """Trainer steps since the oldest version that sampled one of its tokens."""
    finish_reason: str
    reason: str = ""
    """Why it failed; there is then neither text nor reward."""


class Decoder:
    """Token ids to text with the run's own tokenizer; where that, or its library, is not here, ids stay ids."""

    def __init__(self, folder: Path | None) -> None:
        self._tokenizer: Any = None
        file = folder / "tokenizer.json" if folder is not None else None
        if file is not None and file.is_file() and find_spec("tokenizers") is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(str(token) for token in ids)
        decoded: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return decoded

    @classmethod
    def of_run(cls, record: RunRecord) -> Decoder:
        facts = RunFolder(Path(record.folder)) if record.folder else None
        fields = facts.read_json(facts.facts_file) if facts is not None else None
        return cls(Path(fields["folder"]) if fields else None)


def rollouts_of(group: Group, producer: str, step: int, decoder: Decoder) -> Iterator[Shown]:
    """The trajectories of a group, read at trainer step `step`, then the members that failed."""
    for trajectory in group.trajectories:
        prompt, completion = split(trajectory)
        yield Shown(
            f"{group.environment}/{group.index}",
            producer,
            decoder.text(prompt),
            decoder.text(completion),
            trajectory.reward,
            lag(trajectory, step),
            trajectory.finish_reason,
        )
    for reason in (group.error,) if group.error else group.failures:
        yield Shown(f"{group.environment}/{group.index}", producer, "", "", 0.0, 0, "failed", reason)


def split(trajectory: Trajectory) -> tuple[list[int], list[int]]:
    """Token ids before the first sampled one, and all from it on."""
    sampled = np.flatnonzero(trajectory.loss_mask_T)
    first = int(sampled[0]) if sampled.size else len(trajectory.token_ids_T)
    ids = [int(token) for token in trajectory.token_ids_T]
    return ids[:first], ids[first:]


def lag(trajectory: Trajectory, step: int) -> int:
    return max((step - span.version.step for span in trajectory.spans), default=0)


async def stream(operator: OperatorPort, console: Console, *, count: int, follow: bool) -> None:
    """Print the newest `count` rollouts that the broker still holds, then, to follow, all that come."""
    decoder = Decoder.of_run(await operator.record())
    newest: deque[Shown] = deque(maxlen=count)
    after = ""
    while batch := await operator.finished(after, 1):
        step = (await operator.state()).step
        for cursor, delivery, producer in batch:
            after = cursor
            newest.extend(rollouts_of(delivery.group, producer, step, decoder))
    for shown in newest:
        show(console, shown)
    while follow:
        batch = await operator.finished(after, BLOCK_MS)
        state = await operator.state()
        for cursor, delivery, producer in batch:
            after = cursor
            for shown in rollouts_of(delivery.group, producer, state.step, decoder):
                show(console, shown)
        follow = bool(batch) or state.status in ("running", "stopping")


def show(console: Console, rollout: Shown) -> None:
    outcome = "" if rollout.reason else f"  reward {rollout.reward:.2f}  lag {rollout.lag}"
    head = f"{rollout.task}{outcome}  {rollout.finish_reason}  {rollout.producer}"
    console.print(Text(printable(head), style="bold" if rollout.reward > 0 else "dim"))
    if rollout.reason:
        console.print(Text.assemble(("  failed      ", "dim"), (one_line(rollout.reason), "red")))
        return
    console.print(Text.assemble(("  prompt      ", "dim"), one_line(rollout.prompt)))
    console.print(Text.assemble(("  completion  ", "dim"), one_line(rollout.completion)))
