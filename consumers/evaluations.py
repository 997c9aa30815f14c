"""Evaluations: held-out prompts asked of producers while training goes on, one version at a time.

Nobody waits for an evaluation but the end of the run. Its version is pinned while it goes on, so that producers that
are past it can go back to it; what it needs to know again stands in the run's folder (`consumers/evaluation.py`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from broker.messages import GroupDelivery, StepEntry, Task
from consumers.asking import Admitter
from consumers.claim import Claim
from consumers.curriculum import Source, held_out_task
from consumers.evaluation import JOURNAL, UNKNOWN, Answer, Decode, Done, Evaluation, Prompt, Result, kept_in
from consumers.ingest import entry, failed
from consumers.lines import Lines
from consumers.progress import Progress
from headrace.config import Config
from headrace.errors import Refused, WireError
from headrace.hosts import host_name
from headrace.version import PolicyVersion
from weightsync.arena import Arena
from weightsync.manifest import Manifest, decode

log = logging.getLogger(__name__)

BATCH = 512
"""Tasks that are admitted at once, so that no script blocks Redis for long."""
SHOWN = 4
"""Results in a heartbeat, the newest."""


class Evaluations:
    """Those of one run, as one trainer makes them."""

    def __init__(
        self,
        claim: Claim,
        config: Config,
        held_out: tuple[Source, ...],
        admitter: Admitter,
        progress: Progress,
        decode: Decode,
        folder: Path,
    ) -> None:
        """Goes on with what an earlier trainer began. Raises CheckpointError, ServiceError for its journal."""
        self._claim = claim
        self._port = claim.port
        self._config = config.evaluation
        self._seed = config.run.seed if config.evaluation.seed is None else config.evaluation.seed
        self._steps = config.run.steps
        self._prompts = {source.environment: config.evaluation.prompts for source in held_out}
        self._admitter = admitter
        self._progress = progress
        self._decode = decode
        self._lines = Lines(folder / JOURNAL, claim.fence.incarnation)
        try:
            kept = kept_in(folder)
        except BaseException:
            self._lines.close()
            raise
        self._done = kept.done
        self._going = kept.going
        self._manifest: bytes | None = None
        """Of the version that is evaluated, once it is sealed."""
        self._unsettled: list[StepEntry] = []
        """Of answers that the disk has no room for yet; at most one per prompt."""
        self._one = asyncio.Lock()
        """Held while tasks are asked or settled: what is settled must not be asked again."""

    @property
    def idle(self) -> bool:
        """Whether none goes on."""
        return self._going is None

    @property
    def missing(self) -> int:
        """Prompts that have not answered yet."""
        return self._going.missing if self._going else 0

    def before(self) -> Result | None:
        """The result of the policy that the run began with."""
        return next((done.result for done in self._done if done.when == "before"), None)

    def of(self, *versions: PolicyVersion | None) -> Result | None:
        """The result of one of these versions."""
        return next((done.result for done in self._done if done.version in versions), None)

    def shown(self) -> dict[str, Any]:
        """For the heartbeat."""
        going = self._going
        told: dict[str, Any] = {"results": [done.shown() for done in self._done[-SHOWN:]]}
        if going is not None:
            told["going"] = {"version": str(going.version), "missing": going.missing, "prompts": going.total}
        return told

    def all(self) -> list[dict[str, Any]]:
        """Every result, for the summary."""
        return [done.shown() for done in self._done]

    # -- when

    def wants_before(self) -> bool:
        """Whether the policy that the run begins with is still to be evaluated."""
        return bool(self._config.prompts) and self.idle and not self._done and self._claim.books.formed == 0

    def due(self, step: int) -> bool:
        """Whether the version of this step is one that is evaluated beside training."""
        every = self._config.every
        return bool(self._config.prompts and every) and step % every == 0 and 0 < step < self._steps

    def missed(self, step: int) -> bool:
        """Whether an earlier trainer ended before it began the evaluation that was due at or before this step."""
        due = step - step % self._config.every if self._config.every else 0
        begun = [done.version.step for done in self._done]
        return self.idle and self.due(due) and max(begun, default=0) < due

    def wants_after(self, same: PolicyVersion | None) -> bool:
        """Whether the last version is still to be evaluated. `same`: another name of the weights that it has."""
        return bool(self._config.prompts) and self.of(self._claim.books.version, same) is None

    # -- what is asked

    async def begin(self, when: str, version: PolicyVersion) -> None:
        """Pin the version, and ask its prompts. Where another evaluation goes on, this one is left out, and says so."""
        async with self._one:
            if self._going is None:
                await self._begin(when, version)
            else:
                self.skip(version, f"the evaluation of {self._going.version} goes on")

    def skip(self, version: PolicyVersion, reason: str) -> None:
        self._progress.event("evaluation_skipped", version=str(version), reason=reason)

    async def resume(self) -> None:
        """Go on with the evaluation that an earlier trainer began; without its version it is given up."""
        async with self._one:
            going = self._going
            if going is None:
                return
            if fault := _gone(await self._port.manifest(going.version)):
                self._going = None
                self._lines.write("given_up", version=str(going.version), reason=fault)
                self._progress.event("evaluation_given_up", version=str(going.version), reason=fault)
                await self._let_go(going)
                return
            await self._ask(going)

    async def _begin(self, when: str, version: PolicyVersion) -> None:
        pinned = version not in await self._port.pinned()
        samples = self._config.samples_per_prompt
        self._going = going = Evaluation(when, version, self._prompts, samples, pinned=pinned)
        fields = {"when": when, "prompts": going.prompts, "samples": samples, "pinned": pinned}
        self._lines.write("begin", version=str(version), **fields)
        self._progress.event("evaluation_begun", version=str(version), when=when)
        await self._ask(going)

    async def _ask(self, going: Evaluation) -> None:
        """Pin the version and ask what has no answer; whatever is outstanding already is not asked again."""
        await self.pin()
        prompts = going.asks()
        for first in range(0, len(prompts), BATCH):
            await self._admit(going, prompts[first : first + BATCH])
        if not going.missing:
            await self._end(going)

    async def _admit(self, going: Evaluation, prompts: list[Prompt]) -> None:
        deadline_ms = await self._admitter.deadline_ms()
        await self._admitter.ask([self._task(going, prompt, deadline_ms) for prompt in prompts])

    async def pin(self) -> None:
        """Keep the version that is evaluated."""
        going = self._going
        if going is None or not going.pinned:
            return
        try:
            await self._port.pin(going.version)
        except Refused as refused:
            self._progress.event("evaluation_not_pinned", version=str(going.version), reason=str(refused))
            log.warning("weight version %s may be gone before it is evaluated: %s", going.version, refused)

    async def announce_again(self) -> None:
        """Where the version lies, to a Redis that came back without it and has a newer head by now."""
        if self._going is not None and self._manifest is not None:
            await self._port.publish_head(self._claim.fence, self._going.version, self._manifest)

    async def _let_go(self, going: Evaluation) -> None:
        if going.pinned:
            await self._port.unpin(going.version)

    def _task(self, going: Evaluation, prompt: Prompt, deadline_ms: int) -> Task:
        return held_out_task(
            going.task_id(prompt),
            prompt.environment,
            prompt.index,
            seed=self._seed,
            group_size=going.samples,
            version=going.version,
            deadline_ms=deadline_ms,
        )

    # -- what comes

    async def receive(self, delivery: GroupDelivery) -> None:
        """Enter a group and settle it, in this order."""
        async with self._one:
            judged = UNKNOWN
            if going := self._going:
                judged = going.judge(delivery.group, self._decode)
                if judged.again is not None:
                    await self._ask_again(going, judged.again, judged.reason)
                if judged.answer is not None:
                    await self._write(going, judged.answer)
            if judged.reason:
                kind = f"evaluation_{judged.verdict}"
                self._progress.event(kind, task=delivery.group.task_id, reason=judged.reason)
            self._unsettled.append(entry(delivery, judged.verdict, judged.reason))
            await self._settle()
            if going is not None and not going.missing:
                await self._end(going)

    async def _ask_again(self, going: Evaluation, prompt: Prompt, reason: str) -> None:
        self._lines.write("again", version=str(going.version), **asdict(prompt), reason=reason)
        going.ask_again(prompt)
        await self._admit(going, [prompt])

    async def give_up(self, task: Task, reason: str) -> None:
        """Nobody finished this task in time."""
        await self.receive(GroupDelivery("", 0, failed(task, reason)))

    async def flush(self) -> None:
        """Write and settle what waited for room on the disk."""
        async with self._one:
            self._lines.flush()
            await self._settle()

    @property
    def trouble(self) -> str:
        """Why lines wait to be written; empty while none does."""
        return self._lines.trouble

    def close(self) -> None:
        self._lines.close()

    async def _write(self, going: Evaluation, answer: Answer) -> None:
        if self._manifest is None and answer.samples:
            # Sampled from, it is sealed.
            self._manifest = await self._port.manifest(going.version)
        example = asdict(answer.example) if answer.example else None
        fields = {"environment": answer.environment, "index": answer.index, "right": answer.right}
        self._lines.write("answer", version=str(going.version), **fields, answered=answer.samples, example=example)
        going.enter(answer)

    async def _settle(self) -> None:
        """What no line would be lost of, were this trainer killed now."""
        if self._lines.trouble:
            return
        entries, self._unsettled = self._unsettled, []
        if entries:
            await self._port.settle(self._claim.fence, entries)

    async def _end(self, going: Evaluation) -> None:
        """All prompts have answered: let the version go, and say what was found."""
        await self._let_go(going)
        self._going, self._manifest = None, None
        done = Done.of(going)
        self._done.append(done)
        self._lines.write("result", **done.shown())
        self._progress.evaluated(done.shown())


def _gone(data: bytes | None) -> str:
    """Why a version with this manifest cannot be evaluated any more; empty where it may be."""
    if data is None:
        return "no host's memory has the version any more"
    try:
        manifest: Manifest = decode(data)
    except WireError as error:
        return str(error)
    here = [part.segment for part in manifest.parts if part.host == host_name()]
    if not all(map(Arena().has, here)):
        return "this host's memory has the version no more"
    return ""
