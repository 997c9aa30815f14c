"""Asking: free slots become tasks, and evaluations become theirs."""

from __future__ import annotations

from broker.api import Balance, Fence
from broker.connect import Run
from broker.messages import Task
from consumers.admission import Window
from consumers.books import Books
from consumers.curriculum import Curriculum, Prompt, Source, evaluation_tasks
from headrace.config import Config


class Admitter:
    """Admits tasks under the fence. The broker counts what is outstanding; here it is only compared with the bound."""

    def __init__(
        self, port: Run, fence: Fence, books: Books, config: Config, window: Window, curriculum: Curriculum
    ) -> None:
        self._port = port
        self._fence = fence
        self._books = books
        self._config = config
        self._window = window
        self._curriculum = curriculum
        self.open = False
        """False until the first evaluation has its tasks, which come before all others."""

    async def fill(self) -> int:
        """Admit as many training tasks as there are free slots; returns how many."""
        books = self._books
        async with books.lock:
            outstanding = (await self.sheet()).outstanding - books.unsettled_groups
            count = self._window.free(books.formed, outstanding)
            if count:
                deadline_ms = await self._deadline_ms()
                tasks = [self._task(books.cursor + offset, deadline_ms) for offset in range(count)]
                await self._port.admit(self._fence, tasks)
                books.cursor += count
            return count

    async def evaluation(self, when: str, held_out: Source) -> list[Task]:
        """The tasks of an evaluation on the newest version. Raises ConfigError."""
        return evaluation_tasks(
            when,
            held_out,
            self._config.evaluation.prompts,
            seed=self._config.run.seed,
            group_size=self._config.evaluation.samples_per_prompt,
            version=self._books.version,
            deadline_ms=await self._deadline_ms(),
        )

    async def ask(self, tasks: list[Task]) -> None:
        """Admit the tasks of an evaluation; training tasks may follow."""
        await self._port.admit(self._fence, tasks)
        self.open_up()

    def open_up(self) -> None:
        """From now on training tasks are admitted."""
        self.open = True
        self._books.slots.set()

    async def sheet(self) -> Balance:
        """The balance of training tasks."""
        found = [sheet for sheet in await self._port.balance() if sheet.kind == "train"]
        return found[0] if found else Balance("train", 0, 0, {})

    def _task(self, number: int, deadline_ms: int) -> Task:
        return self._curriculum.task(
            Prompt(number),
            group_size=self._config.trainer.group_size,
            min_version=self._window.min_version(self._books.formed, self._books.first),
            deadline_ms=deadline_ms,
            formed=self._books.formed,
        )

    async def _deadline_ms(self) -> int:
        """Of tasks admitted now, on the broker's clock: this machine's may be off."""
        return await self._port.now_ms() + round(self._config.broker.task_deadline_s * 1000)
