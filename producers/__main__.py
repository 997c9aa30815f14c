"""Rolls out the tasks of a run until the run ends. Needs only the URL of the run's broker and the run's id.

Set them as HEADRACE_REDIS_URL and HEADRACE_RUN, or pass flags. A URL with a password belongs into the environment:
command lines can be read by everybody on the machine, so that one in --redis-url is refused.
"""

from __future__ import annotations

import sys

from headrace.invocation import Invocation, run
from headrace.service import Service


async def start(service: Service, told: Invocation) -> None:
    from producers.start import start as begin

    await begin(service, told)


if __name__ == "__main__":
    sys.exit(run("producer", "producers", __doc__, sys.argv[1:], start))
