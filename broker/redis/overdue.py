"""Tasks that nobody finished in time: read from where they wait and are played."""

from __future__ import annotations

from broker.codec import decode_task
from broker.messages import Task
from broker.redis.link import Link, entries_of
from headrace.errors import WireError

PAGE = 256
"""Tasks read at once."""


async def overdue(link: Link, before_ms: int) -> list[Task]:
    """Those without a group whose deadline was before this time. One that cannot be read goes to `dead` when taken."""
    found: list[Task] = []
    after = "-"
    while True:
        page = entries_of(await link.send("XRANGE", link.keys.of("tasks"), after, "+", "COUNT", PAGE))
        for _, fields in page:
            try:
                task = decode_task(fields.get(b"body", b""))
            except WireError:
                continue
            if task.deadline_ms < before_ms:
                found.append(task)
        if len(page) < PAGE:
            return found
        after = f"({page[-1][0]}"
