"""Rolls out the tasks of a run until the run ends. Needs only the URL of the run's broker and the run's id.

Set them as HEADRACE_REDIS_URL and HEADRACE_RUN, or pass flags. A URL with a password belongs into the environment:
command lines can be read by everybody on the machine, so that one in --redis-url is refused.
"""

from __future__ import annotations

import sys

from headrace.invocation import Invocation, run
from headrace.service import Service

GRACE_S = 30.0
"""What leaving may take beyond all that has bounds of its own."""
CLOSING_S = 5.0
"""What may be left once everything is closed: threads, and calls of environments that do not heed their end."""


async def start(service: Service, told: Invocation) -> None:
    from producers.start import start as begin
    from producers.watchdog import Watchdog

    producer = await begin(service, told)
    watchdog = Watchdog(told.name, producer.config.producer.lease_s)
    watchdog.start()
    close = producer.on_close

    async def closed() -> None:
        await close()
        watchdog.leave(CLOSING_S, "what was left of it")

    producer.on_close = closed
    producer.on_leave = lambda: watchdog.leave(service.drain_s + GRACE_S, "leaving")


if __name__ == "__main__":
    sys.exit(run("producer", "producers", __doc__, sys.argv[1:], start))
