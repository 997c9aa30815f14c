"""Asking: free slots become tasks, stale prompts are asked again, and evaluations become theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from broker.api import Balance
from broker.messages import Task
from consumers.admission import Window
from consumers.claim import Claim
from consumers.curriculum import Curriculum, Prompt
from consumers.ingest import SeenTasks
from consumers.retention import Retention
from headrace.config import Config


class Admitter:
    """Admits tasks under the fence. The broker counts what is outstanding; here it is only compared with the bound."""

    def __init__(
        self,
        claim: Claim,
        config: Config,
        window: Window,
        curriculum: Curriculum,
        seen: SeenTasks,
        told: Callable[[list[Task]], None] = lambda tasks: None,
    ) -> None:
        """`told` is told of all tasks that were admitted."""
        self._told = told
        self._claim = claim
        self._port = claim.port
        self._fence = claim.fence
        self._books = claim.books
        self._config = config
        self._window = window
        self._retention = Retention.of(config)
        self._curriculum = curriculum
        self._seen = seen
        self.open = False
        """False until the first evaluation has its tasks, which come before all others."""

    @property
    def over(self) -> bool:
        """Whether no step is left that could use a group."""
        return self._books.formed >= self._window.total_steps

    async def fill(self) -> int:
        """Admit as many training tasks as there are free slots, and room for their groups; returns how many."""
        books, mended = self._books, self._port.mended
        async with books.lock:
            outstanding = (await self.sheet()).outstanding - books.unsettled_groups
            retained = books.retained
            coming = max(0, outstanding - retained.waiting)
            count = min(self._window.free(books.formed, outstanding), self._retention.room(retained, coming))
            if count:
                # A Redis that has just come back may count too few as outstanding until it is made whole.
                await self._claim.confirm()
            if self._port.mended != mended:
                books.slots.set()
                return 0
            if count:
                prompts = [Prompt(books.cursor + offset) for offset in range(count)]
                await self._admit(await self._tasks(prompts), books.cursor + count)
                books.cursor += count
            return count

    async def again(self, task_ids: Iterable[str]) -> int:
        """Ask the prompts of these stale tasks once more, where they may be; returns how many.

        It is done before they are settled: so whoever dies in between has lost none, and as their ids follow from
        those of the stale ones, none is asked twice. Each takes the slot that a stale one is about to leave.
        """
        if self.over:
            return 0
        stale = [prompt for task_id in task_ids if (prompt := Prompt.of(task_id))]
        prompts = [prompt.next for prompt in stale if prompt.again < self._config.staleness.requeue]
        prompts = [prompt for prompt in prompts if prompt.task_id not in self._seen]
        if prompts:
            await self._admit(await self._tasks(prompts))
        return len(prompts)

    async def ask(self, tasks: list[Task]) -> None:
        """Admit tasks of an evaluation."""
        await self._admit(tasks)

    def open_up(self) -> None:
        """From now on training tasks are admitted."""
        self.open = True
        self._books.slots.set()

    async def sheet(self) -> Balance:
        """The balance of training tasks."""
        found = [sheet for sheet in await self._port.balance() if sheet.kind == "train"]
        sheet = found[0] if found else Balance("train", 0, 0, {})
        self._books.lost = sheet.verdicts.get("lost", 0)
        return sheet

    async def _admit(self, tasks: list[Task], cursor: int | None = None) -> None:
        await self._port.admit(self._fence, tasks, cursor)
        self._told(tasks)

    async def _tasks(self, prompts: list[Prompt]) -> list[Task]:
        deadline_ms = await self.deadline_ms()
        return [
            self._curriculum.task(
                prompt,
                group_size=self._config.trainer.group_size,
                min_version=self._window.min_version(self._books.formed, self._books.first),
                deadline_ms=deadline_ms,
                formed=self._books.formed,
            )
            for prompt in prompts
        ]

    async def deadline_ms(self) -> int:
        """Of tasks admitted now, on the broker's clock: this machine's may be off."""
        return await self._port.now_ms() + round(self._config.broker.task_deadline_s * 1000)
