"""The keeper of one reward worker: a small process that ends the worker with everything that the worker started.

    python -m producers.rewards.keeper PARENT CHANNEL LIMIT

PARENT is the id of the process that starts it, CHANNEL an inherited socket for the worker's calls, LIMIT the bytes of
memory that the worker's processes may hold together. It runs no code of users and imports little.

Wait graph: it waits for the end of its standard input or of PARENT (whichever tells that the worker is not wanted any
more), for the end of the worker, and for the moment at which the memory is looked at again. Nobody waits for it but
PARENT, after it has closed the standard input. It ends when no process below it is left, and says on its standard
output, as JSON, why: {"exit": code}, {"signal": number}, {"memory": bytes} or {}; with "left" where processes resist.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from producers.rewards.processes import adopt_orphans, descendants, die_with_parent, end_descendants, memory, reap

MOST_BYTES_PER_S = 4 << 30
"""How fast memory can be filled, about; so the next look comes before the limit is far behind."""
SHORTEST_S, LONGEST_S = 0.02, 0.5
"""Between two looks at the memory."""


def keep(parent: int, channel: int, limit: int) -> dict[str, Any]:
    """Start the worker and keep it until it ends, holds too much memory, or nobody wants it; the reason."""
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent_fd = os.pidfd_open(os.getppid())
    if os.getppid() != parent:
        return {}
    worker = _fork(channel)
    os.close(channel)
    told = _watch(worker, parent_fd, limit)
    left = end_descendants()
    return {**told, "left": left} if left else told


def _fork(channel: int) -> int:
    keeper = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    code = 1
    try:
        _become_worker(keeper, channel)
        from producers.rewards.serving import serve

        serve(channel)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become_worker(keeper: int, channel: int) -> None:
    """A session of its own, nothing to read from, no way to write to the keeper's parent but the channel."""
    os.setsid()
    die_with_parent(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.closerange(3, channel)
    os.closerange(channel + 1, channel + 64)
    os.set_inheritable(channel, False)
    # Where the machine's memory runs out, this goes before the engine.
    Path("/proc/self/oom_score_adj").write_text("1000")


def _watch(worker: int, parent_fd: int, limit: int) -> dict[str, Any]:
    poller = select.poll()
    unwanted = {0, parent_fd}
    for fd in (*unwanted, os.pidfd_open(worker)):
        poller.register(fd, select.POLLIN)
    wait_s = SHORTEST_S
    while True:
        ready = {fd for fd, _ in poller.poll(wait_s * 1000)}
        ended = reap()
        if worker in ended:
            code = os.waitstatus_to_exitcode(ended[worker])
            return {"exit": code} if code >= 0 else {"signal": -code}
        if ready & unwanted:
            return {}
        start = time.monotonic()
        used = memory(descendants(), limit)
        if used > limit:
            return {"memory": used}
        # To look takes longer, the more processes there are on this machine: never more than a tenth of the time.
        soonest_s = max(SHORTEST_S, 10 * (time.monotonic() - start))
        wait_s = max(soonest_s, min(LONGEST_S, (limit - used) / MOST_BYTES_PER_S))


if __name__ == "__main__":
    told = keep(*(int(text) for text in sys.argv[1:4]))
    # A producer that was killed hears nothing any more.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(told).encode())
